"""Agents that act in ticks: a world steps, some agents observe, and each gets an action by the deadline."""

from batch_agent.ticks.action import Action, Decision, Observation
from batch_agent.ticks.agent import Agent
from batch_agent.ticks.agent_runtime import AgentRuntime
from batch_agent.ticks.config import Sampling
from batch_agent.ticks.generation import GenerationResult
from batch_agent.ticks.memory import AgentState, Memory, WindowMemory
from batch_agent.ticks.runtime import TickRuntime
from batch_agent.ticks.text_backend import TextBackend

__all__ = [
    "Action",
    "Agent",
    "AgentRuntime",
    "AgentState",
    "Decision",
    "GenerationResult",
    "Memory",
    "Observation",
    "Sampling",
    "TextBackend",
    "TickRuntime",
    "WindowMemory",
]
