"""Runs on a Ray cluster: ``from batch_agent.ray import Ray``. Needs the package ray."""

from batch_agent.ray.workers import Ray

__all__ = ["Ray"]
