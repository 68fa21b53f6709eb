"""Batches that a coding agent starts: each has its own run directory and process.

The process is a detached ``batch-agent run``. It continues when the MCP server ends, and another server finds it by its
directory. All state is read from the run directory; only the child processes to reap are kept in memory.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import cast

from pydantic import JsonValue

from batch_agent.cli.commands.status import status_json
from batch_agent.errors import SpecError
from batch_agent.files.results import to_json
from batch_agent.messages import JsonObject
from batch_agent.record.control import ask
from batch_agent.record.lock import is_locked
from batch_agent.record.private import DIRECTORY
from batch_agent.record.reader import look, open_run
from batch_agent.record.rundir import LOCK, RUN

SPEC, ROWS, LOG = "spec.json", "rows.jsonl", "log.txt"
LOG_CHARACTERS = 2000  # shown from the end of a process's log
SHOWN_CHARACTERS = 20_000  # shown of one row's output


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRequest:
    """The arguments of a batch."""

    instruction: str
    rows: Sequence[Mapping[str, JsonValue]] | None = None
    path: str | None = None
    id_column: str | None = None
    output_schema: JsonObject | None = None
    output_path: str | None = None
    max_concurrency: int | None = None
    max_cost: float | None = None
    max_rows: int | None = None
    model: str | None = None
    system_prompt: str | None = None
    runtime: str | None = None

    def check(self) -> None:
        if (self.rows is None) == (self.path is None):
            raise SpecError("give either rows or path, the path of a CSV or JSONL file")
        if self.max_cost is None and self.max_rows is None:
            raise SpecError("a limit is required: give max_cost, in dollars, or max_rows")
        if self.max_rows is not None and self.max_rows < 1:
            raise SpecError("max_rows must be above 0")


@dataclass(slots=True)
class Batches:
    """The batches below ``directory``. ``options`` are added to the spec of each: the backend, the model."""

    directory: Path
    options: JsonObject = field(default_factory=dict)
    max_cost: float | None = None  # maximum cost of one batch
    _children: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def prepare(self, request: BatchRequest) -> str:
        """Write the spec of a new batch and return its name. Raises SpecError if the request is invalid."""
        request.check()
        name = f"mcp-{datetime.now().astimezone():%Y%m%d-%H%M%S}-{secrets.token_hex(3)}"
        place = self.directory / name
        place.mkdir(DIRECTORY, parents=True)
        try:
            (place / SPEC).write_bytes(to_json(self._spec(request, place)))
        except BaseException:
            self.discard(name)
            raise
        return name

    def _spec(self, request: BatchRequest, place: Path) -> dict[str, object]:
        spec: dict[str, object] = {**self.options, "task": request.instruction, "inputs": self._inputs(request, place)}
        for option, value in (
            ("output_schema", request.output_schema),
            ("max_inflight", request.max_concurrency),
            ("model", request.model),
            ("system_prompt", request.system_prompt),
            ("runtime", request.runtime),
            ("id_column", request.id_column),
            ("max_cost", _least(request.max_cost, self.max_cost)),
        ):
            if value is not None:
                spec[option] = value
        return spec

    def _inputs(self, request: BatchRequest, place: Path) -> str:
        """Return the file of rows: the given one, or one that is written beside the spec."""
        if request.path is not None:
            return str(Path(request.path).absolute())
        with (place / ROWS).open("wb") as file:
            file.writelines(to_json(row) + b"\n" for row in request.rows or ())
        return ROWS

    def plan(self, name: str, max_rows: int | None) -> JsonObject:
        """Return the plan of a prepared batch. Raises SpecError if it cannot start."""
        command = [*_command("run", str(self.directory / name / SPEC), "--dry-run", "--json"), *_limit(max_rows)]
        done = subprocess.run(command, capture_output=True, stdin=subprocess.DEVNULL, check=False)
        if done.returncode:
            raise SpecError(_words(done.stderr))
        plan: JsonObject = json.loads(done.stdout)
        plan.pop("first_prompt_pieces", None)
        return plan

    def discard(self, name: str) -> None:
        """Delete a batch that was only planned."""
        shutil.rmtree(self.directory / name)

    def start(self, name: str, request: BatchRequest) -> None:
        place = self.directory / name
        arguments = ["run", str(place / SPEC), "--run-dir", str(place), "--json", *_limit(request.max_rows)]
        if request.output_path is not None:
            arguments += ["--output", str(Path(request.output_path).absolute())]
        self._spawn(name, arguments)

    def resume(self, name: str, max_cost: float | None) -> None:
        place = self._place(name)
        if is_locked(place / LOCK):
            raise SpecError(f"{name} is running")
        cost = _least(max_cost, self.max_cost) if max_cost is not None else None
        more = [] if cost is None else ["--max-cost", str(cost)]
        self._spawn(name, ["resume", str(place), "--json", *more])

    def stop(self, name: str, *, now: bool) -> None:
        """Stop a batch. Running agents finish, unless ``now`` is True. Raises NotAlive if it is not running."""
        asyncio.run(ask(self._place(name), {"do": "cancel" if now else "drain"}))

    def status(self, name: str) -> JsonObject:
        """Return the status of a batch. ``state`` is ``starting`` until its record exists."""
        place, child = self._place(name), self._children.get(name)
        alive = child is not None and child.poll() is None
        if child is not None and not alive:
            del self._children[name]
        if not (place / RUN).exists():
            locked = bool(is_locked(place / LOCK))
            if alive or locked:
                return {"batch": name, "state": "starting"}
            return {"batch": name, "state": "failed", "why": self._log(name)}
        status = status_json(look(place))
        if alive:  # also before a resume starts, and while the last lines are written
            status["state"] = "running"
        status.pop("summary", None)
        if status["state"] == "failed":
            status.setdefault("log", self._log(name))
        return {"batch": name, "run_dir": str(place), **status}

    def results(self, name: str, offset: int, limit: int, *, failed_only: bool) -> JsonObject:
        """Return ``limit`` finished rows in input order, from ``offset`` on."""
        place = self._place(name)
        with open_run(place) as run:
            records = (record for record in run.rows if not failed_only or not record.get("ok"))
            page = list(islice(records, offset, offset + limit + 1))
        return {
            "batch": name,
            "rows": [_shown(cast("JsonObject", record)) for record in page[:limit]],
            "next_offset": offset + limit if len(page) > limit else None,
        }

    def show(self, name: str, row: str, *, full: bool) -> str:
        command = _command("show", str(self._place(name)), f"--row={row}", *(["--full"] if full else []))
        done = subprocess.run(command, capture_output=True, stdin=subprocess.DEVNULL, check=False)
        text = done.stdout.decode(errors="replace").strip()
        if done.returncode or not text:
            raise SpecError(_words(done.stderr) or f"there is no row {row}")
        return text

    def _place(self, name: str) -> Path:
        place = self.directory / name
        if place.parent != self.directory or not (place / SPEC).exists():
            known = sorted(path.parent.name for path in self.directory.glob(f"*/{SPEC}"))
            raise SpecError(f"there is no batch {name!r}; there are {', '.join(known[-20:]) or 'none'}")
        return place

    def _spawn(self, name: str, arguments: Sequence[str]) -> None:
        with (self.directory / name / LOG).open("ab") as log:
            self._children[name] = subprocess.Popen(
                _command(*arguments),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=log,
                start_new_session=True,  # it survives this server, and does not get its Ctrl-C
            )

    def _log(self, name: str) -> str:
        try:
            return _words((self.directory / name / LOG).read_bytes())
        except OSError:
            return ""


def _command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "batch_agent", *arguments]


def _words(stderr: bytes) -> str:
    """Return the end of a command's messages."""
    return stderr.decode(errors="replace").strip().removeprefix("batch-agent: ")[-LOG_CHARACTERS:]


def _limit(max_rows: int | None) -> list[str]:
    return [] if max_rows is None else ["--limit", str(max_rows)]


def _least(*values: float | None) -> float | None:
    return min((value for value in values if value is not None), default=None)


def _shown(record: JsonObject) -> JsonObject:
    shown: JsonObject = {name: record.get(name) for name in ("index", "job_id", "ok", "output")}
    if not record.get("ok"):
        shown["error"] = record.get("error")
    if len(to_json(shown["output"])) > SHOWN_CHARACTERS:
        cut = record["output"] if isinstance(record["output"], str) else to_json(record["output"]).decode()
        shown["output"] = f"{cut[:SHOWN_CHARACTERS]}... (cut; show_row or the results file has the full text)"
    return shown
