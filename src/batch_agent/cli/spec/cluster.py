"""The cluster of ``--ray`` and its flags."""

from __future__ import annotations

import argparse

from batch_agent.cli.spec.arguments import CLUSTER
from batch_agent.errors import SpecError


def cluster_of(options: argparse.Namespace) -> dict[str, object]:
    """Return the option ``cluster``, or no option without ``--ray``."""
    given = {name: value for name in CLUSTER if (value := getattr(options, name)) is not None}
    address = given.pop("ray", None)
    if address is None:
        for name in given:
            raise SpecError(f"--{name.replace('_', '-')} is for a Ray cluster: also give --ray")
        return {}
    from batch_agent.ray.workers import Ray

    return {"cluster": Ray(str(address), **given)}
