"""What rows share, and what another order would cost."""

from __future__ import annotations

from batch_agent import BatchAgent
from batch_agent.agent.dryrun import DryRun
from batch_agent.compiler.layout import Layout, layout_of

WORDS = "eight ch" * 10  # 80 characters, 20 tokens


def plan(task: str, inputs: list[dict[str, str]]) -> Layout:
    prepared = BatchAgent.plan(task=task, inputs=inputs, backend="simulated://")
    return DryRun.of(prepared).description.layout


def test_shared_material_first_is_computed_once_and_own_first_for_every_row() -> None:
    layout = Layout(prefix_tokens=8_512, own_tokens=500, sibling_tokens=0, late_tokens=0)
    assert layout.computed(100) == 58_512
    assert layout.own_first(100) == 901_200
    assert "15.4 times" in dict(layout.facts(100))["layout"]


def test_rows_about_the_same_document_share_more_than_the_prefix_of_all() -> None:
    rows = [{"text": f"{document * 100} question {n}"} for document in "ab" for n in range(3)]
    layout = plan("{text}", rows)
    assert layout.prefix_tokens == 0
    assert 25 <= layout.sibling_tokens <= layout.own_tokens


def test_text_that_is_the_same_in_all_rows_but_stands_behind_a_field_is_named_with_what_it_costs() -> None:
    rows = [{"name": name} for name in ("ann", "bob", "eve")]
    late, early = plan(f"{{name}}: {WORDS}", rows), plan(f"{WORDS}: {{name}}", rows)
    assert late.late_tokens == 21
    assert early.late_tokens == 0
    assert early.computed(3) < late.computed(3)
    assert any("save 42 tokens" in text for _, text in late.facts(3))


def test_a_batch_without_rows_has_a_layout_too() -> None:
    assert layout_of(7, "", [], ()) == Layout(7, 0, 0, 0)
