"""Text of the task that all rows share, but that comes after a field: ``plan`` says what moving it saves."""

from __future__ import annotations

from batch_agent import BatchAgent
from batch_agent.agent.dryrun import DryRun

WORDS = "eight ch" * 40  # 320 characters, 80 tokens
ROWS = [{"name": name} for name in ("ann", "bob", "eve")]


def plan(task: str) -> DryRun:
    return DryRun.of(BatchAgent.plan(task=task, inputs=ROWS, backend="simulated://"))


def test_text_that_is_the_same_in_all_rows_but_comes_after_a_field_is_named_with_what_it_costs() -> None:
    late, early = plan(f"{{name}}: {WORDS}"), plan(f"{WORDS}: {{name}}")
    assert (late.description.late_tokens, early.description.late_tokens) == (81, 0)
    assert early.uncached_tokens is not None and late.uncached_tokens is not None
    assert early.uncached_tokens < late.uncached_tokens
    assert "81 tokens of the task are the same in all rows, but come after a field" in late.to_text()
    assert "saves 162 tokens" in late.to_text()
    assert "advice" not in early.to_text()


def test_a_few_words_after_a_field_are_not_worth_advice() -> None:
    assert "advice" not in plan("{name}: answer in one word").to_text()
