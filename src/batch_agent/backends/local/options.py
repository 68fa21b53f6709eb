"""Options of a ``local://…`` URL: the model, threads, and memory for the KV cache."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import parse_qsl, unquote, urlsplit

from batch_agent.backends.address import check_known
from batch_agent.backends.local import weights
from batch_agent.errors import SpecError

KEPT_SECONDS = 300  # default of ``keep``
TOPOLOGY = Path("/sys/devices/system/cpu")


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """``path`` is None for a model that is downloaded by name."""

    model: str
    path: Path | None
    threads: int
    kv_gb: int = 1
    max_seqs: int = 64
    keep: int = 0  # seconds that the model stays loaded after its last use

    @property
    def url(self) -> str:
        return f"local://{self.model if self.path is None else self.path}"


def parse_url(url: str) -> EngineOptions:
    """Return the options of a ``local://…`` URL. Raises SpecError."""
    parts = urlsplit(url)
    if parts.scheme != "local":
        raise SpecError(f"{url!r} is not a local:// URL")
    model = unquote(parts.netloc + parts.path) or weights.SMOLLM2.name
    given = dict(parse_qsl(parts.query, keep_blank_values=True))
    check_known(given, ("threads", "kv_gb", "max_seqs", "keep"), "local:// has no option")
    return EngineOptions(
        model=model,
        path=_path(model),
        threads=_positive(given, "threads", physical_cores()),
        kv_gb=_positive(given, "kv_gb", 1),
        max_seqs=_positive(given, "max_seqs", 64),
        keep=0 if given.get("keep") == "0" else _positive(given, "keep", KEPT_SECONDS),
    )


def _path(model: str) -> Path | None:
    if weights.find(model) is not None:
        return None
    path = Path(model).expanduser()
    if path.suffix != ".gguf":
        names = ", ".join((*(one.name for one in weights.KNOWN), weights.HUB_FORM))
        raise SpecError(f"local://{model}: neither a model known by name ({names}) nor a path to a .gguf file")
    if not path.is_file():
        raise SpecError(f"local://{model}: there is no file {path.absolute()}")
    return path.absolute()


def _positive(given: dict[str, str], name: str, default: int) -> int:
    text = given.get(name, str(default))
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise SpecError(f"local://: {name}={text!r} is not a whole number above zero")
    return int(text)


def physical_cores() -> int:
    """Return the physical cores this process may use: a second thread on one core slows the first down."""
    try:
        usable = os.sched_getaffinity(0)
    except AttributeError:
        return os.cpu_count() or 1
    cores = set()
    for cpu in usable:
        try:
            cores.add((TOPOLOGY / f"cpu{cpu}/topology/thread_siblings_list").read_text())
        except OSError:
            cores.add(str(cpu))
    return len(cores) or 1
