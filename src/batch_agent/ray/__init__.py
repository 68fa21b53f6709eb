"""Runs on a Ray cluster: ``Ray`` for ``BatchAgent.run(…, cluster=…)``, ``map_dataset`` for Ray Data.

Needs the package ray.
"""

from batch_agent.ray.datasets import map_dataset
from batch_agent.ray.workers import Ray

__all__ = ["Ray", "map_dataset"]
