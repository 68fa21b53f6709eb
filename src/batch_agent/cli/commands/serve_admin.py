"""``batch-agent serve status|list|cancel|export``: by the address of a server and a key, or by its ``--data``."""

from __future__ import annotations

import argparse
import os
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import orjson
from pydantic import JsonValue

from batch_agent.cli.output.streams import put, say
from batch_agent.errors import SpecError
from batch_agent.messages import JsonObject
from batch_agent.serve.catalog import Catalog, ServedBatch
from batch_agent.serve.lines import ERRORS, OUTPUT, PART
from batch_agent.serve.objects import batch_object

CHUNK_BYTES = 1024 * 1024
SECONDS = 60.0


def admin_command(options: argparse.Namespace) -> int:
    if options.action == "export":
        return _export(options)
    document = _ask(options) if options.url else _read(options)
    if options.json:
        put(orjson.dumps(document, option=orjson.OPT_INDENT_2).decode())
    elif options.action == "list":
        for line in _listed(document):
            put(line)
    elif options.action == "cancel":
        put(f"{document['id']} is {document['status']}")
    else:
        for name, value in document.items():
            put(f"{name}: {value if not isinstance(value, dict | list) else orjson.dumps(value).decode()}")
    return 0


def _listed(document: JsonObject) -> Iterator[str]:
    batches = document["data"]
    assert isinstance(batches, list)
    for batch in batches:
        assert isinstance(batch, dict)
        counts = batch["request_counts"]
        assert isinstance(counts, dict)
        done = f"{counts['completed']} of {counts['total']} done, {counts['failed']} failed"
        yield f"{batch['id']}  {batch['status']}  {batch['tenant']}  {batch['endpoint']}  {done}"


# By address


def _path(options: argparse.Namespace) -> str:
    match options.action:
        case "status":
            return "/serve/status"
        case "list":
            return "/serve/batches?limit=1000"
        case "cancel":
            return f"/serve/batches/{options.batch}/cancel"
    return f"/serve/batches/{options.batch}/export"


def _open(options: argparse.Namespace) -> BinaryIO:
    url = options.url.rstrip("/").removesuffix("/v1") + _path(options)
    if not url.startswith(("http://", "https://")):
        raise SpecError(f"--url {options.url}: write http://HOST:PORT")
    key = options.key or os.environ.get("OPENAI_API_KEY", "")
    method = "POST" if options.action == "cancel" else "GET"
    request = urllib.request.Request(url, method=method, headers={"Authorization": f"Bearer {key}"})
    try:
        opened: BinaryIO = urllib.request.urlopen(request, timeout=SECONDS)
    except urllib.error.HTTPError as error:
        raise SpecError(f"{url} answered {error.code}: {_message(error.read())}") from None
    except OSError as error:
        raise SpecError(f"{url}: {getattr(error, 'reason', error)}") from None
    return opened


def _message(body: bytes) -> str:
    try:
        return str(orjson.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return body[:200].decode("utf-8", "replace")


def _ask(options: argparse.Namespace) -> JsonObject:
    with _open(options) as answer:
        document: JsonObject = orjson.loads(answer.read())
        return document


# By the directory


def _catalog(options: argparse.Namespace) -> Catalog:
    data = Path(options.data)
    if not (data / "serve.db").exists():
        raise SpecError(f"{data} is not the --data of a server: there is no serve.db; or give --url and --key")
    return Catalog(data)


def _read(options: argparse.Namespace) -> JsonObject:
    with _catalog(options) as catalog:
        if options.action == "status":
            unfinished = catalog.unfinished()
            left = sum(batch.total - batch.completed - batch.failed for batch in unfinished)
            today: dict[str, JsonValue] = {**catalog.used_today()}
            return {"batches": len(unfinished), "lines_left": left, "tokens_today": today}
        if options.action == "list":
            return {"data": [_shown(batch) for batch in catalog.batches(None, limit=1000)]}

        def change(batch: ServedBatch) -> ServedBatch | None:
            if batch.status not in ("validating", "in_progress"):
                return None
            return batch.at("cancelling", time.time(), stop="cancelled")

        changed = catalog.change_batch(options.batch, change)
        if changed is None:
            raise SpecError(f"there is no batch {options.batch!r}")
        return _shown(changed)


def _shown(batch: ServedBatch) -> JsonObject:
    return {**batch_object(batch, None), "tenant": batch.tenant, "api": batch.wire}


def _export(options: argparse.Namespace) -> int:
    with _sources(options) as sources:
        if options.output is None:
            sys.stdout.flush()
            for source in sources:
                _copy(source, sys.stdout.buffer)
            return 0
        part = Path(options.output + PART)
        with part.open("wb") as file:
            for source in sources:
                _copy(source, file)
        part.replace(options.output)
    say(f"wrote {options.output}")
    return 0


class _sources:  # noqa: N801
    """The files with the outcomes of a batch, opened."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._opened: list[BinaryIO] = []

    def __enter__(self) -> list[BinaryIO]:
        options = self._options
        if options.url:
            self._opened.append(_open(options))
            return self._opened
        with _catalog(options) as catalog:
            if catalog.batch(options.batch) is None:
                raise SpecError(f"there is no batch {options.batch!r}")
        folder = Path(options.data) / "batches" / options.batch
        for name in (OUTPUT, ERRORS, OUTPUT + PART, ERRORS + PART):
            if (folder / name).exists():
                self._opened.append((folder / name).open("rb"))
        return self._opened

    def __exit__(self, *exception: object) -> None:
        for file in self._opened:
            file.close()


def _copy(source: BinaryIO, target: BinaryIO) -> None:
    while chunk := source.read(CHUNK_BYTES):
        target.write(chunk)
