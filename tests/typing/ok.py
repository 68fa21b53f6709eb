"""Read by mypy alone: pyright does not look at the truth of an attribute, by its own design, and has ``if result``."""

from typing import assert_type

from batch_agent import AgentError, AgentResult


def settled(result: AgentResult[int]) -> int:
    if result.ok:
        assert_type(result.error, None)
        return assert_type(result.output, int)
    assert_type(result.output, None)
    assert_type(result.error, AgentError)
    return 0


def early(result: AgentResult[int]) -> int:
    if not result.ok:
        return 0
    return result.output


def several(results: list[AgentResult[int]]) -> list[int]:
    return [result.output for result in results if result.ok]
