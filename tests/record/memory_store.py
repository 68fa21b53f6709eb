"""A store that keeps nothing on disk: the least that a journal can be."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from batch_agent.record.base import Entry, Identity, Progress
from batch_agent.record.steps import Past, read_past


class MemoryStore:
    """``open`` it as often as there are sessions: what was recorded stays."""

    def __init__(self) -> None:
        self._entries: list[Entry] = []
        self._progress: list[Progress] = []
        self._ready: dict[bytes, list[Past]] = {}
        self._claimed: set[int] = set()

    def open(self, path: Path, *, begun: bool) -> MemoryStore:
        return self

    def sessions(self) -> int:
        return len(self._progress)

    def spent(self) -> tuple[int, float]:
        spent = [(past.tokens, past.cost or 0.0) for past in self._progress]
        leases = [past.lease or (0, 0.0) for past in self._progress]
        both = list(zip(spent, leases, strict=True))
        return sum(max(s[0], lent[0]) for s, lent in both), sum(max(s[1], lent[1]) for s, lent in both)

    def learnt(self) -> tuple[int, ...] | None:
        return next((past.learnt for past in reversed(self._progress) if past.learnt is not None), None)

    def next_agent(self) -> int:
        return max((entry.agent for entry in self._entries), default=0) + 1

    def begin(self, fingerprint: bytes, started: str) -> None:
        self._progress.append(Progress())

    def commit(self, entries: Sequence[Entry], progress: Progress) -> None:
        self._entries += entries
        self._progress[-1] = progress

    def sort_by(self, column: Literal["key", "row"]) -> None:
        steps: dict[int, list[Entry]] = {}
        for entry in self._entries:
            steps.setdefault(entry.agent, []).append(entry)
        self._ready, self._claimed = {}, set()
        found = [(mine[-1].identity, read_past(agent, [e.step for e in mine])) for agent, mine in sorted(steps.items())]
        for identity, past in sorted(found, key=lambda item: _rank(item[1])):
            self._ready.setdefault(identity.key, []).append(past)
        if column == "row":
            for identity, past in sorted(found, key=lambda item: (_rank(item[1]), -item[1].agent)):
                self._ready.setdefault(identity.row, []).append(past)

    def claim(self, wanted: Sequence[Identity]) -> list[Past | None]:
        return [self._claim(identity) for identity in wanted]

    def _claim(self, identity: Identity) -> Past | None:
        for past in (*self._ready.get(identity.key, ()), *self._ready.get(identity.row, ())):
            if past.agent not in self._claimed:
                self._claimed.add(past.agent)
                return past
        return None

    def close(self) -> None: ...


def _rank(past: Past) -> int:
    return 0 if past.done else 1 if past.failed is None else 2
