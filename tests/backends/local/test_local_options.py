"""What local:// URLs mean, and what is wrong with those that mean nothing."""

from __future__ import annotations

import importlib.util
import struct
from pathlib import Path

import pytest

from batch_agent.backends.local import from_url
from batch_agent.backends.local.backend import parse_url, physical_cores
from batch_agent.backends.local.gguf import NotGGUF, context_length
from batch_agent.errors import SpecError


def test_nothing_named_is_the_default_model_on_all_cores() -> None:
    options = parse_url("local://")
    assert (options.model, options.path, options.threads) == ("smollm2", None, physical_cores())
    assert parse_url("local://smollm2") == options


def test_a_path_is_a_model_and_the_query_has_its_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tmp_path / "My Models" / "big.gguf"
    model.parent.mkdir()
    model.write_bytes(b"GGUF")
    monkeypatch.chdir(tmp_path)
    options = parse_url("local://My%20Models/big.gguf?threads=3&kv_gb=2&max_seqs=8")
    assert (options.path, options.threads, options.kv_gb, options.max_seqs) == (model, 3, 2, 8)
    assert parse_url(f"local://{model}").path == model


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("local://gpt5", "smollm2"),
        ("local://no/such.gguf", "no file"),
        ("local://?threads=0", "threads"),
        ("local://?threads=two", "threads"),
        ("local://?thread=2", "did you mean .threads"),
    ],
)
def test_a_wrong_url_says_what_would_be_right(url: str, says: str) -> None:
    with pytest.raises(SpecError, match=says):
        parse_url(url)


def entry(key: str, kind: int, value: bytes) -> bytes:
    return struct.pack("<Q", len(key)) + key.encode() + struct.pack("<I", kind) + value


def test_the_context_is_read_past_strings_and_arrays(tmp_path: Path) -> None:
    text = struct.pack("<Q", 5) + b"llama"
    entries = [
        entry("general.architecture", 8, text),
        entry("some.tokens", 9, struct.pack("<IQ", 8, 2) + text * 2),
        entry("some.scores", 9, struct.pack("<IQ", 6, 3) + bytes(12)),
        entry("llama.context_length", 4, struct.pack("<I", 8192)),
    ]
    file = tmp_path / "m.gguf"
    file.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, len(entries)) + b"".join(entries))
    assert context_length(file) == 8192


@pytest.mark.parametrize("data", [b"", b"PK\x03\x04", b"GGUF", b"GGUF" + struct.pack("<IQQ", 3, 0, 0)])
def test_a_file_that_is_no_model_is_said_to_be_none(tmp_path: Path, data: bytes) -> None:
    file = tmp_path / "m.gguf"
    file.write_bytes(data)
    with pytest.raises(NotGGUF, match=r"m\.gguf"):
        context_length(file)


@pytest.mark.skipif(importlib.util.find_spec("openvino_genai") is not None, reason="the engine is installed")
def test_without_the_engine_the_one_command_that_installs_it_is_named() -> None:
    with pytest.raises(SpecError, match="pip install openvino-genai"):
        from_url("local://")
