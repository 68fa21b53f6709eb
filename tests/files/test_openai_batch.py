import json
import re
from pathlib import Path

import pytest

from batch_agent.files import read_inputs
from batch_agent.job import UnreadableRow


def read_line(path: Path, body: object, **more: object) -> object:
    line = {"custom_id": "r-1", "method": "POST", "url": "/v1/chat/completions", "body": body, **more}
    path.write_text(json.dumps(line) + "\n")
    (row,) = read_inputs(path)
    return row


def test_a_line_becomes_fields_for_a_task(tmp_path: Path) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}]
    row = read_line(tmp_path / "batch.jsonl", {"model": "m", "temperature": 0, "messages": messages})
    assert row == {
        "id": "r-1",
        "system": "Be brief.",
        "prompt": "Why?",
        "messages": messages,
        "body": {"model": "m", "temperature": 0},
    }


def test_text_parts_are_joined_and_developer_messages_are_instructions(tmp_path: Path) -> None:
    messages = [
        {"role": "system", "content": "a"},
        {"role": "developer", "content": [{"type": "text", "text": "b"}]},
        {"role": "user", "content": "first"},
        {"role": "assistant", "content": "answer"},
        {"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "text", "text": "y"}]},
    ]
    row = read_line(tmp_path / "batch.jsonl", {"messages": messages})
    assert isinstance(row, dict)
    assert (row["system"], row["prompt"], len(row["messages"])) == ("a\n\nb", "xy", 5)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("text", "its body is not an object"),
        ({"input": "x"}, "has no messages .*only chat completions"),
        ({"messages": []}, "has no messages"),
        ({"messages": ["hi"]}, "message 1 has no role"),
        ({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}, "the assistant's"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "message 1 has content other than text"),
        ({"messages": [{"role": "user", "content": None}]}, "content other than text"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "belongs to a tool call"),
        ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "belongs to a tool call"),
    ],
)
def test_what_fields_cannot_carry_fails_with_its_line(tmp_path: Path, body: object, message: str) -> None:
    row = read_line(tmp_path / "batch.jsonl", body)
    assert isinstance(row, UnreadableRow)
    assert "batch.jsonl line 1 is an OpenAI batch line that cannot be used" in row.message
    assert re.search(message, row.message)


def test_a_row_with_other_columns_is_a_row_like_any_other(tmp_path: Path) -> None:
    row = read_line(tmp_path / "batch.jsonl", {"a": 1}, label="x")
    assert isinstance(row, dict) and row["custom_id"] == "r-1" and row["body"] == {"a": 1}
