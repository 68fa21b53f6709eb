"""The HTTP API: files and batches of OpenAI, Message Batches of Anthropic, interactive requests, models.

A handler checks the request, calls the catalog, the batches or the interactive part, and writes the answer in the form
of its API. Tenants are separate: for one tenant, what belongs to another does not exist.
"""

from __future__ import annotations

import asyncio
import re
import shutil
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import BinaryIO, ParamSpec, TypeVar
from warnings import catch_warnings, simplefilter

import orjson
from aiohttp import BadContentDispositionHeader, BadContentDispositionParam, BodyPartReader, web
from aiohttp.http_exceptions import HttpProcessingError
from pydantic import JsonValue

from batch_agent.blocking import in_thread
from batch_agent.door import (
    PATIENCE_SECONDS,
    RequestRefused,
    added_to_answer,
    given_key,
    json_response,
    read_body,
    read_object,
)
from batch_agent.errors import SpecError
from batch_agent.files.json_array import parse_field
from batch_agent.messages import JsonObject
from batch_agent.record.private import private
from batch_agent.run.recording import in_thread as in_whole_thread
from batch_agent.serve import ServeOptions
from batch_agent.serve.asking import CHAT, DIALECTS, MESSAGES, Interactive
from batch_agent.serve.batches import QUEUE_LIMIT, ServedBatches
from batch_agent.serve.catalog import Catalog, KeyReused, ServedBatch, StoredFile, Tenant, Wire, new_id
from batch_agent.serve.directory import ERRORS, OUTPUT, sync
from batch_agent.serve.lines import MessageBatchLines
from batch_agent.serve.logs import ID_HEADERS, note
from batch_agent.serve.models import ServedModels
from batch_agent.serve.objects import (
    ENDPOINTS,
    batch_object,
    file_object,
    log_batch,
    message_batch_object,
    page_object,
    read_expiry,
    read_limit,
    read_metadata,
    seconds_in,
)
from batch_agent.serve.repair import link_input

CHUNK_BYTES = 1024 * 1024
MOST_FIELD_BYTES = 64 * 1024  # of a form, beside its file
MOST_CREATE_BYTES = 1024 * 1024
MOST_MESSAGES_BYTES = 256 * 1024 * 1024  # of a Message Batch
MOST_MESSAGES = 100_000
PURPOSES = ("batch", "assistants", "fine-tune", "vision", "user_data", "evals")
ID = re.compile(r"[A-Za-z0-9_-]{1,128}")
NO_ROOM = "the disk of this server is almost full: no file is accepted now"

# What the parser of forms raises for one that is not well-formed.
BROKEN_FORM = (
    *(ValueError, LookupError, AssertionError, RuntimeError, HttpProcessingError, web.RequestPayloadError),
    *(BadContentDispositionHeader, BadContentDispositionParam),
)

P = ParamSpec("P")
T = TypeVar("T")
Answer = Awaitable[web.StreamResponse]
Serves = Callable[[web.BaseRequest, Tenant, str], Answer]


class Api:
    def __init__(
        self,
        catalog: Catalog,
        batches: ServedBatches,
        interactive: Interactive,
        models: ServedModels,
        options: ServeOptions,
    ) -> None:
        self._catalog = catalog
        self._batches = batches
        self._interactive = interactive
        self._models = models
        self._options, self._now = options, options.now
        self._incoming: Counter[str] = Counter()  # bytes of bodies that are arriving, by tenant
        self._files = catalog.data / "files"
        self._routes: dict[tuple[str, str], Serves] = {
            ("POST", "/v1/files"): self._upload,
            ("GET", "/v1/files"): self._list_files,
            ("GET", "/v1/files/*"): self._show_file,
            ("DELETE", "/v1/files/*"): self._delete_file,
            ("GET", "/v1/files/*/content"): self._file_content,
            ("POST", "/v1/batches"): self._create,
            ("GET", "/v1/batches"): self._list,
            ("GET", "/v1/batches/*"): self._show,
            ("POST", "/v1/batches/*/cancel"): self._cancel,
            ("POST", "/v1/messages/batches"): self._create_messages,
            ("GET", "/v1/messages/batches"): self._list_messages,
            ("GET", "/v1/messages/batches/*"): self._show_messages,
            ("DELETE", "/v1/messages/batches/*"): self._delete_messages,
            ("GET", "/v1/messages/batches/*/results"): self._results,
            ("POST", "/v1/messages/batches/*/cancel"): self._cancel_messages,
            ("GET", "/v1/models"): self._list_models,
            ("GET", "/v1/models/*"): self._show_model,
        }

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        tenant = await in_thread(self._catalog.tenant_of, given_key(request))
        if tenant is None:
            raise RequestRefused(
                401, "Incorrect API key provided.", code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"}
            )
        note(tenant=tenant.label)
        path = request.path.rstrip("/") or "/"
        if (dialect := DIALECTS.get(path)) is not None:
            if request.method != "POST":
                raise RequestRefused(405, f"{path} accepts only POST", headers={"Allow": "POST"})
            return await self._interactive.answer(request, dialect, tenant)
        pattern, id = _pattern(path)
        handler = self._routes.get(("GET" if request.method == "HEAD" else request.method, pattern))
        if handler is None:
            allowed = ", ".join(method for method, known in self._routes if known == pattern)
            if not allowed:
                raise RequestRefused(404, f"Invalid URL ({request.method} {path})")
            raise RequestRefused(405, f"{path} accepts only {allowed}", headers={"Allow": allowed})
        return await handler(request, tenant, id)

    # Files

    async def _upload(self, request: web.BaseRequest, tenant: Tenant, _: str) -> web.StreamResponse:
        if not request.content_type.startswith("multipart/"):
            raise RequestRefused(400, "a file is uploaded as multipart/form-data with a file and a purpose")
        size = request.content_length or 0
        if size > tenant.max_file + MOST_FIELD_BYTES:
            raise self._too_large(tenant)
        self.check_room(size)
        with self._arriving(tenant, size):
            return await self._take_upload(request, tenant)

    @contextmanager
    def _arriving(self, tenant: Tenant, size: int) -> Iterator[None]:
        """Count the bytes of a body against the quota of its tenant while they arrive."""
        self._incoming[tenant.name] += size
        try:
            yield
        finally:
            self._incoming[tenant.name] -= size

    def _check_quota(self, tenant: Tenant, size: int) -> None:
        """Raise RequestRefused if a tenant may not have another file of ``size`` bytes. Blocks."""
        most_files, most_bytes = tenant.max_files, tenant.max_bytes
        if most_files is None and most_bytes is None:
            return
        files, stored = self._catalog.stored(tenant.name).get(tenant.name, (0, 0))
        told = ""
        if most_files is not None and files >= most_files:
            told = f"{files} files are stored, and {most_files} are allowed"
        elif most_bytes is not None and stored + size > most_bytes:
            told = f"{stored} bytes of files are stored, {size} would be added, and {most_bytes} are allowed"
        if told:
            raise RequestRefused(413, f"{told}: delete files that are not needed", code="quota_exceeded")

    async def _take_upload(self, request: web.BaseRequest, tenant: Tenant) -> web.StreamResponse:
        await in_thread(self._check_quota, tenant, self._incoming[tenant.name])
        id = new_id("file-")
        part, fields = self._files / f"{id}.part", dict[str, str]()
        name: str | None = None
        try:
            async with asyncio.timeout(None) as limit:
                watch = _Watch(limit, PATIENCE_SECONDS)
                reader = await request.multipart()
                while (field := await reader.next()) is not None:
                    watch.alive()
                    if not isinstance(field, BodyPartReader):
                        raise RequestRefused(400, "a form inside the form is not accepted")
                    field_name, file_name = _names_of(field)
                    if field_name == "file" and name is None:
                        name = file_name
                        await self._store(_chunks(field, watch), part, tenant.max_file, self._too_large(tenant))
                    else:
                        fields[field_name] = await _field(field, watch)
            file = self._checked_file(id, tenant, name, fields, part)
            await _on_disk(sync, part)
            await in_thread(part.rename, self._files / id)
            try:
                await in_thread(self._catalog.add_file, file, partial(self._check_quota, tenant, file.bytes))
            except RequestRefused:
                await in_thread((self._files / id).unlink, missing_ok=True)
                raise
        except TimeoutError:
            raise RequestRefused(408, "the file came too slowly") from None
        except BROKEN_FORM as error:
            told = " ".join(str(error).split())[:200] or type(error).__name__
            raise RequestRefused(400, f"the form cannot be read: {told}") from None
        finally:
            part.unlink(missing_ok=True)
        return json_response(file_object(file))

    def _checked_file(
        self, id: str, tenant: Tenant, name: str | None, fields: dict[str, str], part: Path
    ) -> StoredFile:
        if name is None:
            raise RequestRefused(400, "Missing required parameter: 'file'.", param="file")
        purpose = fields.get("purpose")
        if purpose not in PURPOSES:
            told = f"'{purpose}' is not one of {list(PURPOSES)} - 'purpose'"
            raise RequestRefused(400, told if purpose else "Missing required parameter: 'purpose'.", param="purpose")
        expiry: JsonValue = None
        if any(each.startswith("expires_after") for each in fields):
            seconds = fields.get("expires_after[seconds]", "")
            expiry = {
                "anchor": fields.get("expires_after[anchor]"),
                "seconds": int(seconds) if seconds.isdecimal() else None,
            }
        after, now = read_expiry(expiry, "expires_after"), self._now()
        expires = now + (self._options.keep if after is None else after)
        return StoredFile(
            id, tenant.name, name[:512], part.stat().st_size, purpose, now, expires, kept_since=None if after else now
        )

    async def _store(self, chunks: AsyncIterator[bytes], path: Path, most: int, too_large: RequestRefused) -> str:
        """Write the body that a client sends to disk. Returns its digest. Raises RequestRefused with ``too_large`` if
        it has more than ``most`` bytes."""
        digest, size = sha256(), 0
        with await _on_disk(_created, path) as file:
            async for chunk in chunks:
                size += len(chunk)
                if size > most:
                    raise too_large
                self.check_room(0)
                digest.update(chunk)
                await _on_disk(file.write, chunk)
        return digest.hexdigest()

    def _too_large(self, tenant: Tenant) -> RequestRefused:
        return RequestRefused(413, f"the file is larger than {tenant.max_file} bytes", param="file")

    def check_room(self, size: int) -> None:
        if shutil.disk_usage(self._catalog.data).free - size < self._options.reserve:
            raise RequestRefused(507, NO_ROOM, code="insufficient_storage")

    async def _list_files(self, request: web.BaseRequest, tenant: Tenant, _: str) -> web.StreamResponse:
        query = request.query
        limit = read_limit(query, 10_000, 10_000)
        order = query.get("order", "desc")
        if order not in ("asc", "desc"):
            raise RequestRefused(400, "order must be asc or desc", param="order")
        purpose, after = query.get("purpose"), query.get("after")
        if after is not None:
            await self._file(tenant, after, param="after")
        found = await in_thread(
            self._catalog.files,
            tenant.name,
            purpose=purpose,
            after=after,
            limit=limit + 1,
            newest_first=order == "desc",
        )
        items = [file_object(file) for file in found[:limit]]
        return json_response(page_object(items, more=len(found) > limit))

    async def _file(self, tenant: Tenant, id: str, *, param: str | None = None) -> StoredFile:
        file = await in_thread(self._catalog.file, id, tenant.name)
        if file is None:
            raise RequestRefused(404, f"No such File object: {id}", param=param or "id")
        return file

    async def _show_file(self, request: web.BaseRequest, tenant: Tenant, id: str) -> web.StreamResponse:
        return json_response(file_object(await self._file(tenant, id)))

    async def _delete_file(self, request: web.BaseRequest, tenant: Tenant, id: str) -> web.StreamResponse:
        file = await self._file(tenant, id)
        await in_thread(self._catalog.remove_file, file)
        return json_response({"id": id, "object": "file", "deleted": True})

    async def _file_content(self, request: web.BaseRequest, tenant: Tenant, id: str) -> web.StreamResponse:
        file = await self._file(tenant, id)
        return await send_files(request, [self._catalog.content_of(file)], "application/octet-stream")

    # Batches of OpenAI

    async def _create(self, request: web.BaseRequest, tenant: Tenant, _: str) -> web.StreamResponse:
        raw = await read_body(request, PATIENCE_SECONDS, MOST_CREATE_BYTES)
        body = read_object(raw)
        known = {"input_file_id", "endpoint", "completion_window", "metadata", "output_expires_after"}
        if extra := sorted(body.keys() - known):
            raise RequestRefused(400, f"Unknown parameter: '{extra[0]}'.", param=extra[0], code="unknown_parameter")
        for name in ("input_file_id", "endpoint", "completion_window"):
            if not isinstance(body.get(name), str):
                told = f"Missing required parameter: '{name}'."
                raise RequestRefused(400, told, param=name, code="missing_required_parameter")
        digest = sha256(orjson.dumps(body, option=orjson.OPT_SORT_KEYS)).hexdigest()
        if (before := await self._before(request, tenant, digest)) is not None:
            return self._batch_response(before)
        endpoint, window = str(body["endpoint"]), str(body["completion_window"])
        if endpoint not in ENDPOINTS:
            told = f"Invalid value: '{endpoint}'. Supported values are: {', '.join(map(repr, ENDPOINTS))}."
            raise RequestRefused(400, told, param="endpoint", code="invalid_value")
        seconds = seconds_in(window)
        if seconds is None:
            told = f"Invalid value: '{window}'. It is 24h, or any number with s, m, h or d."
            raise RequestRefused(400, told, param="completion_window", code="invalid_value")
        metadata = read_metadata(body.get("metadata"))
        expires = read_expiry(body.get("output_expires_after"), "output_expires_after")
        file = await self._file(tenant, str(body["input_file_id"]), param="input_file_id")
        if file.purpose != "batch":
            told = f"The file {file.id} has the purpose '{file.purpose}': it must be 'batch'."
            raise RequestRefused(400, told, param="input_file_id")
        now = self._now()
        batch = ServedBatch(
            new_id("batch_"), tenant.name, "openai", endpoint, window, now, now + seconds,
            input_file=file.id, metadata=metadata, output_expires=expires, digest=digest,
        )  # fmt: skip
        self.check_room(0)
        folder = self._batches.draft(batch.id)
        try:
            await in_thread(_link_input, self._catalog.content_of(file), folder)
        except FileNotFoundError:
            raise RequestRefused(404, f"No such File object: {file.id}", param="input_file_id") from None
        return self._batch_response(await self._add(request, batch, folder))

    async def _before(self, request: web.BaseRequest, tenant: Tenant, digest: str) -> ServedBatch | None:
        """Return the batch that was created earlier with the same Idempotency-Key; None if there is none. Raises
        RequestRefused if that request had another body."""
        key = request.headers.get("Idempotency-Key")
        if key is None:
            return None
        batch = await in_thread(self._catalog.batch_under, tenant.name, key)
        if batch is not None and batch.digest != digest:
            raise _reused()
        return batch

    async def _add(
        self,
        request: web.BaseRequest,
        batch: ServedBatch,
        folder: Path,
        admit: Callable[[], None] = lambda: None,
    ) -> ServedBatch:
        """Add a batch. Its files are in ``folder``, which is now renamed to its final name."""
        key, final = request.headers.get("Idempotency-Key"), self._batches.folder(batch.id)
        try:
            await in_whole_thread(partial(folder.rename, final))
            added = await in_whole_thread(partial(self._catalog.add_batch, batch, key, admit))
        except BaseException as error:
            if await in_thread(self._catalog.batch, batch.id) is None:  # else the client left after it was added
                for each in (folder, final):
                    await in_thread(shutil.rmtree, each, ignore_errors=True)
            if isinstance(error, KeyReused):
                raise _reused() from None
            raise
        if added.id == batch.id:
            log_batch(added)
            await self._batches.start(batch)
        else:
            await in_thread(shutil.rmtree, final, ignore_errors=True)
        return added

    def _batch_response(self, batch: ServedBatch) -> web.Response:
        return json_response(batch_object(self._batches.progress(batch), self._batches.estimate(batch)))

    async def _list(self, request: web.BaseRequest, tenant: Tenant, _: str) -> web.StreamResponse:
        limit, after = read_limit(request.query, 100, 20), request.query.get("after")
        if after is not None:
            await self._batch(tenant, after)
        found = await in_thread(self._catalog.batches, tenant.name, "openai", after=after, limit=limit + 1)
        items = [batch_object(self._batches.progress(batch), self._batches.estimate(batch)) for batch in found[:limit]]
        return json_response(page_object(items, more=len(found) > limit))

    async def _batch(self, tenant: Tenant, id: str, wire: Wire = "openai") -> ServedBatch:
        batch = await in_thread(self._catalog.batch, id, tenant.name, wire)
        if batch is None:
            raise RequestRefused(404, f"No {'batch' if wire == 'openai' else 'message batch'} found with id '{id}'.")
        return batch

    async def _show(self, request: web.BaseRequest, tenant: Tenant, id: str) -> web.StreamResponse:
        return self._batch_response(await self._batch(tenant, id))

    async def _cancel(self, request: web.BaseRequest, tenant: Tenant, id: str) -> web.StreamResponse:
        batch = await self._batch(tenant, id)
        if batch.is_over and batch.status != "cancelled":
            raise RequestRefused(409, f"Cannot cancel a batch with status '{batch.status}'.")
        return self._batch_response(await self._batches.cancel(id) or batch)

    # Message Batches of Anthropic

    async def _create_messages(self, request: web.BaseRequest, tenant: Tenant, _: str) -> web.StreamResponse:
        self.check_room(request.content_length or 0)
        now, window = self._now(), self._options.anthropic_window
        id = new_id("msgbatch_")
        folder, kept = self._batches.draft(id), False
        await in_thread(folder.mkdir, mode=0o700)
        try:
            body = folder / "body.json"
            digest = await self._spool(request, body)
            if (before := await self._before(request, tenant, digest)) is not None:
                return self._message_batch(request, before)
            size = body.stat().st_size
            total, model = await in_thread(_read_messages, body, folder)

            def admit() -> None:
                self._check_quota(tenant, size)
                if over := self._batches.over_limit(tenant, total):
                    raise RequestRefused(429, f"{QUEUE_LIMIT}: {over}")

            batch = ServedBatch(
                id, tenant.name, "anthropic", "/v1/messages", f"{window:g}s", now, now + window, "in_progress",
                times={"in_progress": now}, total=total, model=model, digest=digest, bytes=size,
            )  # fmt: skip
            kept = True  # from here on, the catalog says whether it is there
            added = await self._add(request, batch, folder, admit)
            return self._message_batch(request, added)
        finally:
            if not kept:
                await in_thread(shutil.rmtree, folder, ignore_errors=True)

    async def _spool(self, request: web.BaseRequest, path: Path) -> str:
        """Write the body of a request to disk. Returns its digest."""
        too_large = RequestRefused(413, "the body is larger than 256 MB")
        if (request.content_length or 0) > MOST_MESSAGES_BYTES:
            raise too_large
        try:
            async with asyncio.timeout(None) as limit:
                chunks = _watched(request, _Watch(limit, PATIENCE_SECONDS))
                return await self._store(chunks, path, MOST_MESSAGES_BYTES, too_large)
        except TimeoutError:
            raise RequestRefused(408, "the body came too slowly") from None

    def _message_batch(self, request: web.BaseRequest, batch: ServedBatch) -> web.Response:
        return json_response(message_batch_object(self._batches.progress(batch), _address(request)))

    async def _list_messages(self, request: web.BaseRequest, tenant: Tenant, _: str) -> web.StreamResponse:
        query, limit = request.query, read_limit(request.query, 1000, 20)
        after, before = query.get("after_id"), query.get("before_id")
        if after is not None and before is not None:
            raise RequestRefused(400, "before_id and after_id cannot be used together")
        if (cursor := after or before) is not None:
            await self._batch(tenant, cursor, "anthropic")
        ask = partial(self._catalog.batches, tenant.name, "anthropic", after=after, before=before, limit=limit + 1)
        found = await in_thread(ask)
        page = found[-limit:] if before is not None else found[:limit]
        items = [message_batch_object(self._batches.progress(batch), _address(request)) for batch in page]
        document = page_object(items, more=len(found) > limit)
        del document["object"]
        return json_response(document)

    async def _show_messages(self, request: web.BaseRequest, tenant: Tenant, id: str) -> web.StreamResponse:
        return self._message_batch(request, await self._batch(tenant, id, "anthropic"))

    async def _cancel_messages(self, request: web.BaseRequest, tenant: Tenant, id: str) -> web.StreamResponse:
        batch = await self._batch(tenant, id, "anthropic")
        return self._message_batch(request, await self._batches.cancel(id) or batch)

    async def _delete_messages(self, request: web.BaseRequest, tenant: Tenant, id: str) -> web.StreamResponse:
        batch = await self._batch(tenant, id, "anthropic")
        if not batch.is_over:
            raise RequestRefused(400, f"Message batch {id} is in progress: cancel it before you delete it.")
        await self._batches.remove(batch)
        return json_response({"id": id, "type": "message_batch_deleted"})

    async def _results(self, request: web.BaseRequest, tenant: Tenant, id: str) -> web.StreamResponse:
        batch = await self._batch(tenant, id, "anthropic")
        if not batch.is_over:
            raise RequestRefused(404, f"Message batch {id} has no results yet: it has not ended.")
        folder = self._batches.folder(id)
        return await send_files(request, [folder / OUTPUT, folder / ERRORS], "application/x-jsonl")

    # Models

    async def _list_models(self, request: web.BaseRequest, tenant: Tenant, _: str) -> web.StreamResponse:
        names = await self._models.models()
        if "anthropic-version" in request.headers:
            document = page_object([_anthropic_card(name) for name in names], more=False)
            del document["object"]
            return json_response(document)
        return json_response({"object": "list", "data": [_card(name) for name in names]})

    async def _show_model(self, request: web.BaseRequest, tenant: Tenant, id: str) -> web.StreamResponse:
        if id not in await self._models.models():
            raise RequestRefused(404, f"The model '{id}' does not exist", param="model", code="model_not_found")
        return json_response(_anthropic_card(id) if "anthropic-version" in request.headers else _card(id))


def refuse(request: web.BaseRequest, refused: RequestRefused) -> web.Response:
    """Return an error in the form of the API to which the request was sent."""
    if request.path.startswith("/v1/messages") or "anthropic-version" in request.headers:
        document = MESSAGES.error(refused)
        document["request_id"] = added_to_answer(request).get(ID_HEADERS[0])
        return json_response(document, refused.status)
    return json_response(CHAT.error(refused), refused.status)


def _pattern(path: str) -> tuple[str, str]:
    """Return the route of a path, with * in place of the id, and the id."""
    for start in ("/v1/messages/batches/", "/v1/files/", "/v1/batches/"):
        if path.startswith(start):
            id, slash, rest = path[len(start) :].partition("/")
            if not ID.fullmatch(id):
                raise RequestRefused(404, f"there is no object with the id {id[:64]!r}")
            return f"{start}*{slash}{rest}", id
    if path.startswith("/v1/models/"):
        return "/v1/models/*", path.removeprefix("/v1/models/")
    return path, ""


class _Watch:
    """Ends a request whose bytes stop arriving."""

    def __init__(self, limit: asyncio.Timeout, patience: float) -> None:
        self._limit, self._patience = limit, patience
        self.alive()

    def alive(self) -> None:
        self._limit.reschedule(asyncio.get_running_loop().time() + self._patience)


async def _watched(request: web.BaseRequest, watch: _Watch) -> AsyncIterator[bytes]:
    async for chunk in request.content.iter_chunked(CHUNK_BYTES):
        watch.alive()
        yield chunk


async def _chunks(field: BodyPartReader, watch: _Watch) -> AsyncIterator[bytes]:
    held = bytearray()
    while chunk := await field.read_chunk(64 * 1024):
        watch.alive()
        held += chunk
        if len(held) >= CHUNK_BYTES:
            yield bytes(held)
            held.clear()
    if held:
        yield bytes(held)


async def _field(field: BodyPartReader, watch: _Watch) -> str:
    text = b""
    async for chunk in _chunks(field, watch):
        text += chunk
        if len(text) > MOST_FIELD_BYTES:
            raise RequestRefused(413, f"the field {field.name!r} of the form is too large")
    return text.decode("utf-8", "replace")


async def _on_disk(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call a function that writes, in a thread. Raises RequestRefused if the disk fails or is full."""
    try:
        return await in_thread(function, *args, **kwargs)
    except OSError as error:
        raise RequestRefused(507, f"{NO_ROOM} ({error.strerror})") from None


def _names_of(field: BodyPartReader) -> tuple[str, str]:
    """Return the name of a part of a form, and the name of its file. Raises one of ``BROKEN_FORM`` for an unreadable
    header, and RequestRefused for a file name that could add lines to a header or a log."""
    with catch_warnings():
        simplefilter("error")  # else a name that cannot be read is missing
        name = field.name or ""
        file_name = field.filename or "file"
    if not file_name.isprintable():
        raise RequestRefused(400, "the filename has a line break or another control character", param="file")
    return name, file_name


def _created(path: Path) -> BinaryIO:
    return open(path, "wb", opener=private)


def _opened(path: Path) -> BinaryIO:
    return path.open("rb")


def _link_input(source: Path, folder: Path) -> None:
    folder.mkdir(mode=0o700)
    try:
        link_input(source, folder)
    except FileNotFoundError:
        folder.rmdir()
        raise


def _read_messages(body: Path, folder: Path) -> tuple[int, str | None]:
    """Write the requests of a Message Batch as lines. Returns their number, and the model if all have the same one.
    Raises RequestRefused."""
    lines = MessageBatchLines(folder)
    try:
        with body.open("rb") as file:
            chunks = iter(partial(file.read, CHUNK_BYTES), b"")
            for place, request in enumerate(parse_field(chunks, "body", "requests")):
                if place >= MOST_MESSAGES:
                    raise RequestRefused(400, f"requests: at most {MOST_MESSAGES} are allowed")
                if wrong := lines.add(request):
                    raise RequestRefused(400, wrong)
        checked = lines.finish()
        if not checked.total:
            raise RequestRefused(400, "requests: a list of at least 1 item is required")
        return checked.total, checked.model
    except SpecError as error:
        raise RequestRefused(400, f"requests: {error}") from None
    finally:
        lines.close()
        body.unlink(missing_ok=True)


async def send_files(request: web.BaseRequest, paths: list[Path], kind: str) -> web.StreamResponse:
    """Send files one after another as one answer. Memory does not grow with their size."""
    with suppress(FileNotFoundError):
        sizes = [path.stat().st_size if path.exists() else 0 for path in paths]
        response = web.StreamResponse(headers={"Content-Type": kind, "Content-Length": str(sum(sizes))})
        await response.prepare(request)
        if request.method == "HEAD":
            return response
        for path, size in zip(paths, sizes, strict=True):
            if size:
                with await in_thread(_opened, path) as file:
                    while chunk := await in_thread(file.read, CHUNK_BYTES):
                        await response.write(chunk)
        await response.write_eof()
        return response
    raise RequestRefused(404, "the content of this file is gone")


def _reused() -> RequestRefused:
    told = "The Idempotency-Key was used before with another body."
    return RequestRefused(409, told, code="idempotency_key_reused")


def _address(request: web.BaseRequest) -> str:
    return f"{request.scheme}://{request.headers.get('Host', '')}"


def _card(name: str) -> JsonObject:
    return {"id": name, "object": "model", "created": 0, "owned_by": "batch-agent"}


def _anthropic_card(name: str) -> JsonObject:
    known: JsonObject = {"id": name, "type": "model", "display_name": name, "created_at": "1970-01-01T00:00:00Z"}
    unknown = ("capabilities", "line", "max_input_tokens", "max_tokens", "deprecated_at", "retires_at")
    return {**known, "lifecycle": "active", **dict.fromkeys(unknown)}
