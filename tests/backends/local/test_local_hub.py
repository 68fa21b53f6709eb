"""A file from the hub arrives whole and checked, whatever breaks on the way."""

from __future__ import annotations

import hashlib
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.backends.local.hub_server import COMMIT, FILE, REPO, Hub, serve

from batch_agent.backends.local import weights
from batch_agent.backends.local import weights as client
from batch_agent.backends.local.weights import HubFile, fetch_file
from batch_agent.cli.main import main
from batch_agent.errors import SpecError

DATA = b"GGUF" + bytes(range(251)) * 20_000
TINY = HubFile(REPO, FILE)
NAME = f"hf:{REPO}/{FILE}"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy", "HF_TOKEN", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("BATCH_AGENT_CACHE", str(tmp_path / "cache"))
    with serve(Hub(DATA)) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        yield hub


def fetched(path: Path, file: HubFile = TINY) -> list[tuple[int, int | None]]:
    seen: list[tuple[int, int | None]] = []
    digest = fetch_file(file, path, lambda *step: seen.append(step), pause=0.0)
    assert path.read_bytes() == DATA and digest == hashlib.sha256(DATA).hexdigest()
    assert [entry.name for entry in path.parent.iterdir() if entry.name.endswith(".part")] == []
    return seen


def test_a_file_is_downloaded_from_where_the_hub_sends_us_with_progress(hub: Hub, tmp_path: Path) -> None:
    seen = fetched(tmp_path / FILE)
    assert seen[0] == (0, len(DATA)) and seen[-1] == (len(DATA), len(DATA)) and len(seen) > 3
    assert [what for host, what, _ in hub.requests if host == "hub"] == [
        f"HEAD /{REPO}/resolve/main/{FILE}",
        f"GET /{REPO}/resolve/{COMMIT}/{FILE}",  # the version that was checked, also if another one came meanwhile
    ]


def test_a_token_goes_to_the_hub_and_not_to_the_other_host(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.token = "hf_secret"
    with pytest.raises(SpecError, match=r"401 GatedRepo.*set HF_TOKEN"):
        fetched(tmp_path / FILE)
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    with pytest.raises(SpecError, match="accept its terms") as caught:
        fetched(tmp_path / FILE)
    assert "hf_wrong" not in str(caught.value)
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    fetched(tmp_path / FILE)
    assert all("authorization" not in headers for host, _, headers in hub.requests if host == "other")


def test_a_download_that_breaks_goes_on_where_it_was(hub: Hub, tmp_path: Path) -> None:
    hub.cuts, hub.refusals = [1_000_000, 2_000_000], [503]
    fetched(tmp_path / FILE)
    assert hub.downloads == ["all", "all", "bytes=1000000-", "bytes=3000000-"]


def test_a_server_without_ranges_starts_again(hub: Hub, tmp_path: Path) -> None:
    hub.cuts, hub.ranges = [1_000_000], False
    fetched(tmp_path / FILE)
    assert hub.downloads == ["all", "bytes=1000000-"]


def test_what_was_downloaded_before_a_lasting_break_is_kept_for_the_next_command(hub: Hub, tmp_path: Path) -> None:
    hub.cuts = [3_000_000, *[0] * client.ATTEMPTS]
    with pytest.raises(SpecError, match=r"stopped at 3 MB of 5 MB.*the same command again to continue"):
        fetched(tmp_path / FILE)
    hub.requests.clear()
    assert fetched(tmp_path / FILE)[0] == (3_000_000, len(DATA))
    assert hub.downloads == ["bytes=3000000-"]


def test_a_download_that_was_killed_goes_on(hub: Hub, tmp_path: Path) -> None:
    hub.cuts = [2_000_000]
    code = (
        "import os, sys, signal; from pathlib import Path; from batch_agent.backends.local.weights import *\n"
        f"report = lambda done, total: done >= 2_000_000 and os.kill(os.getpid(), signal.SIGKILL)\n"
        f"fetch_file(HubFile({REPO!r}, {FILE!r}), Path({str(tmp_path / FILE)!r}), report)"
    )
    killed = subprocess.run([sys.executable, "-c", code], check=False)
    assert killed.returncode == -signal.SIGKILL and not (tmp_path / FILE).exists()
    hub.cuts.clear()
    assert fetched(tmp_path / FILE)[0][0] > 0
    assert hub.downloads[-1].startswith("bytes=")


def test_other_bytes_than_the_hub_states_are_deleted(hub: Hub, tmp_path: Path) -> None:
    hub.sent = DATA[:-1] + b"!"
    with pytest.raises(SpecError, match=r"the hub reports .*fetch it again"):
        fetched(tmp_path / FILE)
    assert [entry.name for entry in tmp_path.iterdir() if FILE in entry.name] == []
    hub.sent = DATA + b"more"
    with pytest.raises(SpecError, match="the hub reports"):
        fetched(tmp_path / FILE)
    hub.sent = None
    fetched(tmp_path / FILE)


@pytest.mark.parametrize(
    ("file", "why"),
    [
        (HubFile(REPO, "other.gguf"), "no file other.gguf in acme/tiny-GGUF"),
        (HubFile("acme/none", FILE), "RepoNotFound"),
        (HubFile(REPO, FILE, "v9"), "no file tiny.gguf"),
    ],
)
def test_what_the_hub_does_not_have_is_said(hub: Hub, tmp_path: Path, file: HubFile, why: str) -> None:
    with pytest.raises(SpecError, match=why):
        fetched(tmp_path / FILE, file)


def test_a_repository_that_moved_is_followed(hub: Hub, tmp_path: Path) -> None:
    fetched(tmp_path / FILE, HubFile("old/name", FILE))


def test_a_file_without_a_hash_is_refused(hub: Hub, tmp_path: Path) -> None:
    hub.stated = '"0123456789abcdef"'
    with pytest.raises(SpecError, match="does not report its SHA-256"):
        fetched(tmp_path / FILE)


def test_a_full_disk_is_known_before_the_download(hub: Hub, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"needs 5 MB and .* free: make room, or set BATCH_AGENT_CACHE"):
        fetch_file(TINY, tmp_path / FILE, lambda *step: None, spare_bytes=10**18)
    assert hub.downloads == []


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("HF_ENDPOINT", "http://127.0.0.1:9", "is unreachable: .*HF_ENDPOINT for a mirror"),
        ("HF_ENDPOINT", "hub.example", "HF_ENDPOINT is not"),
        ("HF_HUB_OFFLINE", "1", "HF_HUB_OFFLINE is set"),
    ],
)
def test_a_hub_that_cannot_be_asked_is_said(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: str, why: str
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(SpecError, match=why):
        fetched(tmp_path / FILE)


def test_a_proxy_of_the_environment_is_asked(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://hub.invalid")
    monkeypatch.setenv("http_proxy", hub.url)
    monkeypatch.delenv("no_proxy", raising=False)
    with pytest.raises(SpecError):
        fetched(tmp_path / FILE)
    assert hub.requests[0][1] == f"HEAD http://hub.invalid/{REPO}/resolve/main/{FILE}"


def test_the_command_fetches_a_file_by_its_address_and_lists_it(
    hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["models", "fetch", NAME]) == 0
    path = tmp_path / "cache" / "models" / "hub" / REPO / FILE
    assert capsys.readouterr().out.strip() == str(path) and path.read_bytes() == DATA
    before = len(hub.requests)
    assert main(["models", "fetch", NAME]) == 0
    assert len(hub.requests) == before, "it is there"
    assert path in [model.path for model in weights.available()]
    path.write_bytes(DATA[:-1] + b"!")
    assert main(["models", "fetch", NAME]) == 0
    assert path.read_bytes() == DATA


@pytest.mark.parametrize("name", ["hf:", "hf:owner", "hf:owner/repo", "hf:owner/repo/file.bin", "hf:../../etc/x.gguf"])
def test_an_address_in_another_form_is_refused(name: str) -> None:
    with pytest.raises(SpecError, match=r"is not hf:owner/repo/file.gguf"):
        weights.find(name)


def test_models_of_the_table_have_a_repository_a_licence_and_a_size() -> None:
    for known in weights.QWENS:
        assert weights.find(known.name) is known
        assert known.source.repo.startswith("Qwen/Qwen") and known.source.file.endswith(".gguf")
        assert "memory" in known.description and known.size_bytes > 10**8
