"""Test doubles that ship with the package: users test and plan with the same doubles as this project.

``ScriptedServer`` a model server on a real socket with scripted answers · ``MessagesServer`` the same on Anthropic's
wire, as strict as its API · ``BatchServer`` the batch APIs of both · ``ScriptedBackend`` scripted answers without
sockets · ``SimulatedServer`` the simulated engine over HTTP · ``run_virtual``, ``virtual_clock`` virtual time.
"""

from batch_agent.testing.backend import ScriptedBackend
from batch_agent.testing.batch_server import BatchJob, BatchServer
from batch_agent.testing.clock import VirtualClockDeadlock, VirtualClockLoop, run_virtual, virtual_clock
from batch_agent.testing.messages_server import MessagesServer
from batch_agent.testing.replies import Body, CallTools, Cut, Fail, Hang, Malformed, Say, StreamError, ToolUse
from batch_agent.testing.request import Request
from batch_agent.testing.server import ScriptedServer
from batch_agent.testing.simulate import SimulatedServer, serve_simulated

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
    "ToolUse",
    "VirtualClockDeadlock",
    "VirtualClockLoop",
    "run_virtual",
    "serve_simulated",
    "virtual_clock",
]
