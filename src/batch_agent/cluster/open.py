"""Opens a run whose ``run_dir`` is a URL."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import JsonValue

from batch_agent.cluster.fed_run import FedRun
from batch_agent.engine.run.prepare import Prepared
from batch_agent.events import Sink
from batch_agent.store.address import StoreAddress
from batch_agent.store.redis.store import RedisRunStore

logger = logging.getLogger("batch_agent")


def open_fed_run(
    prepared: Prepared, command: Mapping[str, JsonValue] | None = None, sinks: Sequence[Sink] = ()
) -> FedRun[Any]:
    """Return the run of the feeder.

    Raises SpecError for a wrong URL, and for options that other processes cannot use.
    """
    spec = prepared.spec
    address = StoreAddress.parse(str(spec.run_dir))

    def opened() -> RedisRunStore:
        store = RedisRunStore.open(address)
        for danger in store.dangers():
            logger.warning("%s: %s. See docs/cluster.md", address, danger)
        return store

    return FedRun(
        prepared,
        opened,
        sinks,
        command,
        lease=spec.lease,
        keep_results_only=spec.keep == "results",
        feed_only=spec.feed_only,
    )
