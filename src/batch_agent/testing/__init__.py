"""Test doubles that ship with the package: users test and plan with the same doubles as this project.

``ScriptedServer`` a model server on a real socket with scripted answers · ``MessagesServer`` the same on Anthropic's
wire, as strict as its API · ``BatchServer`` the batch APIs of both · ``ScriptedBackend`` scripted answers without
sockets · ``SimulatedServer`` the simulated engine over HTTP · ``run_virtual``, ``virtual_clock`` virtual time.
"""

from batch_agent.messages import TokenChance
from batch_agent.testing.backend import ScriptedBackend
from batch_agent.testing.batch_server import BatchJob, BatchServer
from batch_agent.testing.clock import VirtualClockDeadlock, VirtualClockLoop, run_virtual, virtual_clock
from batch_agent.testing.messages_server import MessagesServer
from batch_agent.testing.replies import Body, CallTools, Cut, Fail, Hang, Malformed, Say, StreamError, ToolUse
from batch_agent.testing.server import ScriptedServer, SimulatedServer, serve_simulated
from batch_agent.testing.wire import Request

__all__ = [
    "BatchJob",
    "BatchServer",
    "Body",
    "CallTools",
    "Cut",
    "Fail",
    "Hang",
    "Malformed",
    "MessagesServer",
    "Request",
    "Say",
    "ScriptedBackend",
    "ScriptedServer",
    "SimulatedServer",
    "StreamError",
    "TokenChance",
    "ToolUse",
    "VirtualClockDeadlock",
    "VirtualClockLoop",
    "run_virtual",
    "serve_simulated",
    "virtual_clock",
]
