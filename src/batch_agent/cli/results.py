"""Results as lines of JSON, written the moment they are there.

Each line leaves in one piece before the next result is taken, so what a killed run has paid for is on disk.
"""

from __future__ import annotations

import dataclasses
import json
import os
import stat
from enum import Enum
from pathlib import Path
from typing import Protocol, Self

import orjson
from pydantic import BaseModel

from batch_agent.cli.blocking import in_thread
from batch_agent.errors import BatchAgentError, SpecError
from batch_agent.job import AgentResult, UnreadableRow


class ResultWriter(Protocol):
    @property
    def destination(self) -> str:
        """For people: where the results are."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(self, *exception: object) -> None: ...

    async def write(self, result: AgentResult[object]) -> None: ...


def result_line(result: AgentResult[object]) -> bytes:
    """One result as a line of JSON, without the transcript; with the model's raw text when it failed."""
    record: dict[str, object] = {
        "index": result.index,
        "job_id": result.job_id,
        "ok": result.ok,
        "output": result.output,
        "error": result.error,
        "attempts": result.attempts,
        "turns": result.turns,
        "usage": result.usage,
        "timings": result.timings,
        "input": None if isinstance(result.input, UnreadableRow) else result.input,
    }
    if result.cost is not None:
        record["cost"] = result.cost
    if result.repaired:
        record["repaired"] = True
    if not result.ok:
        record["raw_text"] = result.raw_text
    return to_json(record) + b"\n"


def to_json(value: object) -> bytes:
    try:
        return orjson.dumps(value, default=_plain, option=orjson.OPT_NON_STR_KEYS)
    except TypeError:
        # Integers beyond 64 bits and lone surrogates, which a model can write and orjson refuses.
        return json.dumps(value, default=_plain).encode("ascii")


def _plain(value: object) -> object:
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, set | frozenset):
        return list(value)
    return value.value if isinstance(value, Enum) else str(value)


class FileWriter:
    """Results in a file. What was in it goes when the first result comes, not when a run fails to start."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fresh = True
        try:
            self._file = path.open("ab", buffering=0)
        except OSError as error:
            raise SpecError(f"cannot write the results to {path}: {error.strerror}") from None
        self._regular = stat.S_ISREG(os.fstat(self._file.fileno()).st_mode)

    @property
    def destination(self) -> str:
        return str(self._path)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        with self._file:
            if exception[0] is None:  # a run without a single row leaves an empty file, not an old one
                self._clear_old()

    async def write(self, result: AgentResult[object]) -> None:
        try:
            self._clear_old()
            _write_all(self._file.fileno(), result_line(result))
        except OSError as error:
            raise BatchAgentError(f"cannot write the results to {self._path}: {error.strerror}") from None

    def _clear_old(self) -> None:
        if self._fresh and self._regular:
            self._file.truncate(0)
        self._fresh = False


class StdoutWriter:
    """Results on standard output. A reader that is slow makes results wait, not agents that are under way; a reader
    that is gone raises BrokenPipeError."""

    destination = ""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._regular = stat.S_ISREG(os.fstat(descriptor).st_mode)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        pass

    async def write(self, result: AgentResult[object]) -> None:
        line = result_line(result)
        try:
            if self._regular:
                _write_all(self._descriptor, line)
            else:
                await in_thread(lambda: _write_all(self._descriptor, line))
        except BrokenPipeError:
            raise
        except OSError as error:
            raise BatchAgentError(f"cannot write the results to standard output: {error.strerror}") from None


def _write_all(descriptor: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(descriptor, rest) :]
