"""What a worker reads of a learned threshold from the facts of its run."""

from __future__ import annotations

from typing import Any

import pytest

from batch_agent.run import learning
from batch_agent.run.learning import LEARNED, UNTOLD, LearnedThreshold
from batch_agent.trust.order import KeyedOrder

NAMES = [f"row{number}" for number in range(20)]
RANKS = sorted((KeyedOrder("key").rank(name), name) for name in NAMES)
AUDIT, OTHERS = [name for _, name in RANKS[:5]], [name for _, name in RANKS[5:]]
TOLD: dict[str, Any] = {"key": "key", "last": RANKS[4][0].hex(), "decided": False, "threshold": None}


def threshold_of(*facts: dict[str, Any]) -> tuple[LearnedThreshold, list[int]]:
    """Return the threshold of a worker that reads these facts one after the other, and the number of reads."""
    left, reads = [*facts], [0]

    async def read() -> dict[str, Any]:
        reads[0] += 1
        return left.pop(0) if len(left) > 1 else left[0]

    return LearnedThreshold(read), reads


async def test_a_run_without_one_sends_nothing_and_is_asked_once() -> None:
    found, reads = threshold_of({})
    assert [await found.decide(name, 0.9) for name in NAMES] == [False] * len(NAMES)
    assert reads == [1]


async def test_rows_of_the_audit_go_on_whatever_their_doubt_is_and_others_wait_until_it_is_decided() -> None:
    found, reads = threshold_of({LEARNED: TOLD}, {LEARNED: {**TOLD, "decided": True, "threshold": 0.4}})
    assert [await found.decide(name, 0.0) for name in AUDIT] == [True] * 5
    assert reads == [1]
    assert [await found.decide(name, doubt) for name, doubt in zip(OTHERS, (0.4, 0.41, None), strict=False)] == [
        *(False, True, True)
    ]
    assert reads == [2]


async def test_before_it_is_decided_no_other_row_is_sent_or_kept() -> None:
    found, _ = threshold_of({LEARNED: TOLD})
    assert [await found.decide(name, 0.9) for name in OTHERS] == [None] * len(OTHERS)


async def test_where_no_threshold_keeps_the_promise_only_rows_without_a_doubt_go_on() -> None:
    found, _ = threshold_of({LEARNED: {**TOLD, "decided": True, "threshold": None}})
    assert [await found.decide(OTHERS[0], doubt) for doubt in (0.0, 0.99, None)] == [False, False, True]


async def test_a_row_that_is_there_before_the_feeder_has_said_which_rows_are_audited_waits_for_that(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(learning, "LOOK", 0.0)
    found, reads = threshold_of({LEARNED: UNTOLD}, {LEARNED: UNTOLD}, {LEARNED: TOLD})
    assert await found.decide(AUDIT[0], 0.0) is True
    assert reads == [3]
    late, _ = threshold_of({LEARNED: UNTOLD})
    assert await late.decide(AUDIT[0], 0.0) is None
