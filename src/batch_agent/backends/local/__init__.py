"""The embedded engine: inference in a process of our own, on this machine's CPU."""

from batch_agent.backends.local.backend import LocalBackend, from_address, from_url, physical_cores, require_engine

__all__ = ["LocalBackend", "from_address", "from_url", "physical_cores", "require_engine"]
