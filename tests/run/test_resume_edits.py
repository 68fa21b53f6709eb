"""Whatever happens to the list of inputs between two runs, each row ends with the answer to its own question, and only
what has no valid answer is asked."""

from __future__ import annotations

import asyncio
import tempfile
from collections import Counter
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from batch_agent import BatchAgent
from batch_agent.testing import Request, Say, ScriptedBackend

rows = st.lists(
    st.one_of(
        st.fixed_dictionaries({"word": st.sampled_from("abcd")}),
        st.fixed_dictionaries({"word": st.sampled_from("abcd"), "id": st.integers(0, 3)}),
        st.fixed_dictionaries({"word": st.sampled_from("abcd"), "note": st.sampled_from("xy")}),
    ),
    max_size=12,
)


def question(row: dict[str, object]) -> tuple[object, object]:
    return row.get("id"), row["word"]


async def answered(directory: str, inputs: list[dict[str, object]]) -> list[str]:
    """The words asked for in a session over these inputs; checks that every row got its own answer."""
    backend = ScriptedBackend(echo)
    results = await BatchAgent.run(
        task="{word}", inputs=iter(inputs), backend=backend, run_dir=Path(directory), resume=True
    )
    assert [result.output for result in results] == [row["word"] for row in inputs]
    return [request.text for request in backend.requests]


def echo(request: Request) -> Say:
    return Say(request.text)


@given(st.lists(rows, min_size=2, max_size=4))
@settings(max_examples=15, deadline=None)
def test_only_rows_without_a_valid_answer_are_asked_however_the_list_was_edited(
    lists: list[list[dict[str, object]]],
) -> None:
    with tempfile.TemporaryDirectory() as directory:
        have: Counter[tuple[object, object]] = Counter()
        for inputs in lists:
            asked = asyncio.run(answered(directory, inputs))
            want = Counter(map(question, inputs))
            missing = Counter(word for (_, word) in (want - have).elements())
            assert Counter(asked) == missing
            have |= want
