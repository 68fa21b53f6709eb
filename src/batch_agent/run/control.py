"""The interfaces of a run: how it is controlled, what is inside it, and what starts its worker processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from batch_agent.agent.prepare import Prepared
from batch_agent.messages import JsonObject
from batch_agent.observe.statistics import Statistics
from batch_agent.record.timeline import Line
from batch_agent.trust.score import Score

if TYPE_CHECKING:
    from batch_agent.run.lending import Lending
    from batch_agent.run.run import Run


class Controls(Protocol):
    """The controls that a run and a pipeline have in common. A row is named by its id or its index; in a pipeline, as
    ``STAGE/ROW``. Methods that name a row raise SpecError if it is not running."""

    def pause(self) -> None: ...

    def resume(self) -> None: ...

    def drain(self) -> None: ...

    def cancel(self) -> None: ...

    def resize(self, max_inflight: int | None) -> None: ...

    def cancel_row(self, row: str | int) -> None: ...

    def retry_row(self, row: str | int) -> None: ...

    def serve(self) -> Path:
        """Make the record available to worker processes of this machine, and return the path of the socket."""
        ...

    def status(self) -> JsonObject: ...

    def statistics(self) -> Statistics: ...

    def score(self, *, count: bool = True) -> Score:
        """Return how many answers are right so far. Raises SpecError without gold."""
        ...

    def sample(self) -> Line: ...

    def live_rows(self, limit: int = 200) -> list[JsonObject]: ...

    def live_row(self, row: str | int) -> JsonObject: ...


class Inside(Protocol):
    """What a run does if it contains other runs instead of working on rows: the stages of a pipeline."""

    names: Sequence[str]
    parts: Mapping[str, Prepared]  # the stages by name

    async def work(self, run: Run[object]) -> bool:
        """Run the stages. Returns whether all of them ended normally; otherwise their records have the reasons."""
        ...

    def facts(self, prepared: Prepared) -> JsonObject:
        """Return what workers in other processes need to know of the stages."""
        ...

    async def begin_sharing(self, lender: Lending) -> None:
        """Let workers in other processes take rows of the stages that have begun."""
        ...

    def stop_feeding(self) -> None: ...

    def drain(self) -> None: ...

    def stage_row(self, row: str | int) -> tuple[Run[object], str]:
        """Return the run of the stage in a row's name ``STAGE/ROW``, and the name of the row in that run. Raises
        SpecError."""
        ...


class Crew(Protocol):
    """Starts worker processes: on this machine, or on a cluster."""

    def at_work(self, run: Run[object]) -> AbstractAsyncContextManager[None]:
        """Return a context manager during which workers take rows from the record of the run."""
        ...
