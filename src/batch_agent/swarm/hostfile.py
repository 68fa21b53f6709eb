"""Addresses, under the name that programs for swarms import them by; they are the fleet's."""

from __future__ import annotations

from batch_agent.fleet.hostfile import AgentEndpoint, parse_hostfile

__all__ = ["AgentEndpoint", "parse_hostfile"]
