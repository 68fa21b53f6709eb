"""The rows of one stage of a pipeline at one moment, beside the sums over all stages."""

from __future__ import annotations

from dataclasses import dataclass

from batch_agent.messages import JsonObject


@dataclass(frozen=True, slots=True)
class StageCount:
    """The rows of a stage. ``total`` is None while the stage before it may still send rows. ``failed_before``: rows
    that never reached it, because they failed in an earlier stage or in a function between the two."""

    name: str
    total: int | None
    done: int
    failed: int
    alive: int
    failed_before: int = 0

    @property
    def words(self) -> str:
        """Return text such as ``12/50, 1 failed, 4 running``."""
        parts = [f"{self.done:,}" if self.total is None else f"{self.done:,}/{self.total:,}"]
        parts += [f"{self.failed:,} failed"] if self.failed else []
        parts += [f"{self.alive:,} running"] if self.alive else []
        parts += [f"{self.failed_before:,} failed before it"] if self.failed_before else []
        return ", ".join(parts)

    def to_json(self) -> JsonObject:
        return {
            "name": self.name,
            "total": self.total,
            "done": self.done,
            "failed": self.failed,
            "failed_before": self.failed_before,
        }
