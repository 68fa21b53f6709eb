"""Combines many Responses into one value: votes, texts, choices, JSON, numbers, failures. Pure.

Failed Responses are ignored unless ``include_failures`` is set.
"""

from __future__ import annotations

import json
import statistics as numbers
from collections import Counter
from collections.abc import Callable, Sequence
from heapq import nlargest
from typing import TypedDict

from pydantic import JsonValue

from batch_agent.swarm.options import Response

Score = Callable[[Response], float]


class Fault(TypedDict):
    agent_index: int
    error: str | None


class FailureReport(TypedDict):
    total: int
    success_count: int
    failure_count: int
    failures: list[Fault]


def majority_vote(responses: Sequence[Response], include_failures: bool = False) -> tuple[str, float]:
    """Return the most common answer, stripped and in lower case, and its share. On a tie, the first."""
    votes = Counter(response.text.strip().lower() for response in _counted(responses, include_failures))
    if not votes:
        return "", 0.0
    ((winner, count),) = votes.most_common(1)
    return winner, count / votes.total()


def concat(responses: Sequence[Response], separator: str = "\n", include_failures: bool = False) -> str:
    return separator.join(response.text for response in _counted(responses, include_failures))


def best_of(responses: Sequence[Response], score_fn: Score, include_failures: bool = False) -> Response:
    """Return the response with the highest score; a failed one if there is none."""
    nothing = Response(False, "", "there is no answer to choose from")
    return max(_counted(responses, include_failures), key=score_fn, default=nothing)


def top_k(responses: Sequence[Response], k: int, score_fn: Score, include_failures: bool = False) -> list[Response]:
    """Return the ``k`` responses with the highest scores, best first."""
    return nlargest(k, _counted(responses, include_failures), key=score_fn)


def structured_merge(
    responses: Sequence[Response], include_failures: bool = False
) -> tuple[list[JsonValue], list[Fault]]:
    """Return the answers parsed as JSON, with lists flattened, and a Fault for each answer that is not JSON."""
    merged: list[JsonValue] = []
    unread: list[Fault] = []
    for response in _counted(responses, include_failures):
        try:
            value = json.loads(response.text)
        except ValueError as error:
            unread.append({"agent_index": response.agent_index, "error": str(error)})
        else:
            merged.extend(value if isinstance(value, list) else [value])
    return merged, unread


def statistics(
    responses: Sequence[Response], extract_fn: Callable[[Response], float] | None = None, include_failures: bool = False
) -> dict[str, float]:
    """Return statistics of the answers as numbers, or of those from ``extract_fn``; zeros if there are none."""
    number = extract_fn or (lambda response: float(response.text.strip()))
    values = [number(response) for response in _counted(responses, include_failures)]
    return {
        "mean": numbers.mean(values) if values else 0.0,
        "std": numbers.stdev(values) if len(values) > 1 else 0.0,
        "median": numbers.median(values) if values else 0.0,
        "min": min(values, default=0.0),
        "max": max(values, default=0.0),
    }


def failure_report(responses: Sequence[Response]) -> FailureReport:
    failures: list[Fault] = [
        {"agent_index": response.agent_index, "error": response.error} for response in responses if not response.success
    ]
    return {
        "total": len(responses),
        "success_count": len(responses) - len(failures),
        "failure_count": len(failures),
        "failures": failures,
    }


def _counted(responses: Sequence[Response], include_failures: bool) -> list[Response]:
    return [response for response in responses if response.success or include_failures]
