"""Agents that act in ticks: a world steps, some agents observe, and each gets an action by the deadline."""

from batch_agent.ticks.agent import Action, Agent, AgentState, Decision, Memory, Observation, WindowMemory
from batch_agent.ticks.backends import Sampling, TextBackend
from batch_agent.ticks.plain import GenerationResult
from batch_agent.ticks.runtime import AgentRuntime, TickRuntime

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
