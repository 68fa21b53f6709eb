"""Opens runs and pipelines whose ``run_dir`` is a URL."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from pydantic import JsonValue

from batch_agent.agent.prepare import Prepared
from batch_agent.cluster.fed_run import FedRun
from batch_agent.cluster.fed_stages import FedStages
from batch_agent.events import Sink
from batch_agent.record.address import StoreAddress
from batch_agent.record.redis.store import RedisRunStore
from batch_agent.run.steering import Controls

logger = logging.getLogger("batch_agent")


def open_fed_run(
    prepared: Prepared, command: Mapping[str, JsonValue] | None = None, sinks: Sequence[Sink] = ()
) -> FedRun[Any]:
    """Return the run of the feeder.

    Raises SpecError for a wrong URL, and for options that other processes cannot use.
    """
    opened = store_opener(prepared)
    return FedRun(prepared, lambda: opened(""), sinks, command, feed_only=prepared.spec.feed_only)


def open_fed_stages(
    prepared: Prepared,
    stages_work: Callable[[], Awaitable[object]],
    sinks: Sequence[Sink] = (),
    command: Mapping[str, JsonValue] | None = None,
    *,
    controls: Controls,
) -> FedStages:
    """Return the feeder's run around the stages of a pipeline. Raises SpecError as ``open_fed_run`` does."""
    return FedStages(prepared, store_opener(prepared), stages_work, sinks, command, controls=controls)


def store_opener(prepared: Prepared) -> Callable[[str], RedisRunStore]:
    """Return a function that opens the store of a run, or of a stage of it."""
    address = StoreAddress.parse(str(prepared.spec.run_dir))
    address.refuse_stage()

    def opened(stage: str) -> RedisRunStore:
        store = RedisRunStore.open(address.at(address.name, stage))
        for danger in () if stage else store.dangers():
            logger.warning("%s: %s. See docs/cluster.md", address, danger)
        return store

    return opened
