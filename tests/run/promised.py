"""A table whose answers are known, a server that answers it with doubts, and people who know the right answers."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

from batch_agent.backends.base import Capabilities
from batch_agent.messages import TokenChance
from batch_agent.record.people import PeopleReview
from batch_agent.record.promise import PromiseStanding
from batch_agent.run.promise import standing_of
from batch_agent.testing import Fail, Request, Say, ScriptedBackend
from batch_agent.testing.wire import Script

MOODS = {"mood": "angry|calm"}


def table(rows: int, *, wrong: float = 0.1, failed: float = 0.0, seed: int = 1) -> list[dict[str, Any]]:
    """Return rows whose text says what the model answers and how sure it is: wrong answers are doubted more."""
    draw, found = random.Random(seed), []
    for row in range(rows):
        mood = draw.choice(["angry", "calm"])
        is_wrong = draw.random() < wrong
        said = mood if not is_wrong else "calm" if mood == "angry" else "angry"
        chance = min(0.99, max(0.02, draw.gauss(0.55 if is_wrong else 0.85, 0.15)))
        text = "fail" if draw.random() < failed else f"{said} {chance:.3f}"
        found.append({"id": f"r{row}", "text": f"{row}: {text}", "truth": mood})
    return found


def answer(request: Request) -> Say | Fail:
    text = str(request.messages[-1]["content"]).rpartition(": ")[2]
    if text == "fail":
        return Fail(400)
    said, chance = text.split()
    other = "calm" if said == "angry" else "angry"
    likely = math.log(float(chance))
    others = ((said.encode(), likely), (other.encode(), math.log(1 - float(chance))))
    tokens = [TokenChance(b'{"mood": "', 0.0), TokenChance(said.encode(), likely, others), TokenChance(b'"}', 0.0)]
    return Say(json.dumps({"mood": said}), tokens=tokens)


def doubting(script: Script) -> ScriptedBackend:
    """Return a backend in this process that reports how sure each answer is."""
    return ScriptedBackend(script, capabilities=Capabilities(native_schema=True, logprobs=True))


def standing(run: Path | str) -> PromiseStanding:
    """Return how the promise of a recorded run stands."""
    found = standing_of(str(run))
    assert found is not None
    return found


def judge(run: Path | str, rows: list[dict[str, Any]], *, most: int | None = None, who: str = "ann") -> int:
    """Let a person judge what waits, with the right answers, and return the number of judgements."""
    truth, done = {row["id"]: row["truth"] for row in rows}, 0
    with PeopleReview.open(str(run), overlap=0.0) as review:
        while (most is None or done < most) and (shown := review.next(who)) is not None:
            row = shown.row
            review.judge(who, row.row, row.queue, "answer", {"mood": truth[row.id]}, row.input)
            done += 1
    return done
