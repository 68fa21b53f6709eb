"""Repairs the folder of a batch: a part that is missing or damaged is made again from the others.

The input is made from the upload, the index from the input, and unreadable outcomes from the record of the run. If that
is impossible, the batch ends, and its files get every outcome that exists (``salvage``). All functions block.
"""

from __future__ import annotations

import filecmp
import logging
import os
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from itertools import chain
from pathlib import Path
from typing import BinaryIO, cast

import orjson

from batch_agent.errors import StoreError
from batch_agent.messages import JsonObject
from batch_agent.outputs.surrogates import read_json
from batch_agent.serve.catalog import ServedBatch
from batch_agent.serve.directory import ERRORS, INDEX, INPUT, OUTPUT, PART, sync
from batch_agent.serve.lines import (
    BatchLines,
    LineCheck,
    Tallied,
    connect,
    digest_of_id,
    finish_index,
    index_damage,
    open_outcomes,
    raw_lines,
    recorded_outcomes,
    stop_in,
    usage_in,
)

logger = logging.getLogger("batch_agent")


class BeyondRepair(Exception):
    """A batch cannot be continued: too much of it is missing."""


def repair_parts(folder: Path, batch: ServedBatch, upload: Path | None, *, thorough: bool = False) -> list[str]:
    """Make sure that the lines of a batch can be opened. ``upload`` is the content of its input file, if it still
    exists. Returns what was repaired. Raises BeyondRepair."""
    if not folder.is_dir():
        raise BeyondRepair("its folder is missing")
    repaired = []
    if restore_input(folder, upload):
        repaired.append(f"{INPUT} was missing, and comes from the upload")
    if why := index_damage(folder, batch.total, thorough=thorough):
        _rebuild_index(folder, batch, why)
        repaired.append(f"{INDEX} {why}, and was made again from the input")
    if upload is not None and _is_worse(folder, upload):
        (folder / INPUT).unlink()
        restore_input(folder, upload)
        repaired.append(f"{INPUT} was damaged, and comes from the upload")
    return repaired


def restore_input(folder: Path, upload: Path | None) -> bool:
    """Link the input of a batch to the upload if it is missing. Returns whether it was made again."""
    if (folder / INPUT).exists() or upload is None or not upload.exists():
        return False
    link_input(upload, folder)
    return True


def link_input(upload: Path, folder: Path) -> None:
    """Link the upload into the folder of its batch, so that the batch has its input even if the upload is deleted."""
    try:
        os.link(upload, folder / INPUT)
    except FileNotFoundError:
        raise
    except OSError:  # the file system has no links
        shutil.copyfile(upload, folder / INPUT)


def _rebuild_index(folder: Path, batch: ServedBatch, why: str) -> None:
    """Write the index again. A line that cannot be read is not in it. Raises BeyondRepair."""
    try:
        file = (folder / INPUT).open("rb")
    except FileNotFoundError:
        raise BeyondRepair(f"its {INDEX} {why}, and its {INPUT} is missing") from None
    with file, closing(connect(folder / (INDEX + PART), new=True)) as index:
        check = LineCheck(batch.endpoint, lambda model: True, 2**63, index)
        offset = 0
        for place, raw in enumerate(raw_lines(file), start=1):
            start = 3 if not offset and raw.startswith(b"\xef\xbb\xbf") else 0
            text = raw[start:].rstrip(b"\r\n")
            if batch.wire == "anthropic":
                _take_message(check, text, place, offset)
            elif text.strip():
                check.take(text, place, offset + start)
            check.errors.clear()
            offset += len(raw)
        if check.total != batch.total:
            told = f"its {INDEX} {why}, and its {INPUT} has {check.total} lines instead of {batch.total}"
            raise BeyondRepair(told)
        finish_index(folder, index)


def _take_message(check: LineCheck, text: bytes, place: int, offset: int) -> None:
    check.total += 1
    with suppress(ValueError, KeyError, TypeError):
        line = cast("dict[str, object]", read_json(text))
        own, body = line["custom_id"], line["body"]
        if isinstance(own, str) and isinstance(body, dict):
            check.add(own, body, place, offset, len(text))


def _is_worse(folder: Path, upload: Path) -> bool:
    """Return whether the upload of a batch has lines that the batch's copy of it no longer has."""
    own = folder / INPUT
    if not own.exists() or not upload.exists() or own.samefile(upload) or filecmp.cmp(own, upload, shallow=False):
        return False
    with closing(connect(folder / INDEX)) as index:
        return _readable(index, upload) > _readable(index, own)


def _readable(index: sqlite3.Connection, path: Path) -> int:
    """Return how many lines of an index can be read in a file."""
    found = 0
    with path.open("rb") as file:
        for offset, size, id in index.execute("SELECT offset, size, id FROM line"):
            with suppress(ValueError, KeyError, TypeError):
                line = cast("dict[str, object]", read_json(os.pread(file.fileno(), size, offset)))
                found += digest_of_id(str(line["custom_id"])) == id
    return found


# The end of a batch that cannot be continued


def salvage(folder: Path, batch: ServedBatch, reason: str) -> Tallied:
    """Complete the files of a batch that ends as failed. If its lines can be opened, each gets an outcome; otherwise
    the files have the outcomes that exist."""
    try:
        lines = BatchLines(folder, batch)
    except (StoreError, OSError, ValueError, sqlite3.Error) as error:
        logger.info("batch %s: its lines cannot be opened: %s", batch.id, error)
        return _outcomes_alone(folder, batch)
    try:
        lines.finish("failed", reason)
        return lines.tallied
    except (StoreError, OSError, ValueError, sqlite3.Error):
        lines.close()
        return _outcomes_alone(folder, batch)
    finally:
        lines.close()


def _outcomes_alone(folder: Path, batch: ServedBatch) -> Tallied:
    """Complete the files with the outcomes that can be read in them, and with those that the run has delivered."""
    tallied, seen = Tallied(), set[bytes]()
    if not folder.is_dir():
        return tallied
    files: dict[bool, BinaryIO] = {}
    with ExitStack() as opened:
        parts = [open_outcomes(folder, name) for name in (OUTPUT, ERRORS)]
        for ok, name in ((True, OUTPUT), (False, ERRORS)):
            files[ok] = opened.enter_context((folder / f"{name}.new").open("wb"))
        found = chain(_outcomes_in(parts[0], True), _outcomes_in(parts[1], False), _delivered(folder, batch))
        for raw, own, outcome, ok in found:
            if own not in seen:
                seen.add(own)
                files[ok].write(raw)
                tallied.count(ok=ok, stop=stop_in(outcome))
                tallied.add(usage_in(outcome))
    for name, part in zip((OUTPUT, ERRORS), parts, strict=True):
        new = folder / f"{name}.new"
        if new.stat().st_size:
            sync(new)
            new.replace(folder / name)
        else:
            new.unlink()
        if part is not None:
            part.unlink()
    sync(folder)
    return tallied


def _outcomes_in(part: Path | None, ok: bool) -> Iterator[tuple[bytes, bytes, JsonObject, bool]]:
    """Yield the outcomes that can be read in a file: line, digest of the custom_id, outcome, and whether it is an
    answer."""
    if part is None:
        return
    with part.open("rb") as file:
        for raw in file:
            with suppress(ValueError, KeyError, TypeError, AttributeError):
                outcome = orjson.loads(raw)
                if raw.endswith(b"\n"):
                    yield raw, digest_of_id(outcome["custom_id"]), outcome, ok


def _delivered(folder: Path, batch: ServedBatch) -> Iterator[tuple[bytes, bytes, JsonObject, bool]]:
    for number, own, outcome, ok in recorded_outcomes(folder):
        line: JsonObject = {"custom_id": own, **outcome}
        if batch.wire == "openai":
            line = {"id": f"batch_req_{batch.id.rpartition('_')[2]}{number:08x}", **line}
        yield orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE), digest_of_id(own), line, ok
