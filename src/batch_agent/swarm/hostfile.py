"""The fleet's addresses, under the module name that swarm programs import."""

from __future__ import annotations

from batch_agent.fleet.hostfile import AgentEndpoint, parse_hostfile

__all__ = ["AgentEndpoint", "parse_hostfile"]
