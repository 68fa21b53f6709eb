"""CachingBackend wraps any backend: it caches answers on disk and sends identical concurrent requests once.

Only repeatable requests are cached, those at temperature 0 or with a seed; others pass through, and so do those to a
standby, which has another model. The first caller sends the request. Callers with the same request meanwhile wait for
that answer or error. If the first caller is cancelled, another one sends it. So no request outlives its callers, and
nothing here starts a task.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from dataclasses import fields, replace
from hashlib import blake2b
from math import inf
from typing import Self, TypeVar
from weakref import WeakKeyDictionary

from pydantic import JsonValue

from batch_agent.backends.base import Backend, Capabilities, Found, ModelRequest, Once, OnToolCall, RequestShape
from batch_agent.backends.cache_store import ResponseStore, decode_reply, encode_reply
from batch_agent.backends.forwarding import ForwardingBackend
from batch_agent.backends.http.wire import report_calls
from batch_agent.errors import BackendError
from batch_agent.messages import Message, Reply, Usage, content_json

T = TypeVar("T")


def repeatable(temperature: float | None, seed: int | None) -> bool:
    return temperature == 0 or seed is not None


class CachingBackend(ForwardingBackend):
    def __init__(self, inner: Backend, store: ResponseStore) -> None:
        super().__init__(inner)
        self._store = store
        self._thread: ThreadPoolExecutor | None = None  # SQLite is used from one thread, beside the event loop
        self._entered = 0
        self.once: Once | None = None  # shares answers with the other workers of a run
        self._heads: WeakKeyDictionary[RequestShape, bytes] = WeakKeyDictionary()
        # Errors are results too; None: the caller that sent the request was cancelled.
        self._asked: dict[bytes, asyncio.Future[Reply | BackendError | None]] = {}

    @property
    def capabilities(self) -> Capabilities:
        return replace(self.inner.capabilities, batch=False)

    infer_batch = Backend.infer_batch  # each answer is looked up separately

    async def __aenter__(self) -> Self:
        if not self._entered:
            self._thread = ThreadPoolExecutor(1, "batch-agent cache")
            try:
                await self._beside(self._store.open)
                await self.inner.__aenter__()
            except BaseException:
                await self._close()
                raise
        self._entered += 1
        return self

    async def __aexit__(self, *exception: object) -> None:
        self._entered -= 1
        if not self._entered:
            try:
                await self.inner.__aexit__(*exception)
            finally:
                await self._close()

    async def infer(self, request: ModelRequest, on_tool_call: OnToolCall | None = None) -> Reply:
        shape = request.shape
        if request.standby is not None or not repeatable(
            shape.temperature, shape.seed if request.seed is None else request.seed
        ):
            return await self.inner.infer(request, on_tool_call)
        key = self._key(request)
        while (asked := self._asked.get(key)) is not None:
            # Shielded: a cancelled waiter must not cancel the others' request.
            end = await asyncio.shield(asked)
            if isinstance(end, BackendError):
                raise _for_another(end)
            if end is not None:
                return _again(end, on_tool_call)
        return await self._drive(key, request, on_tool_call)

    async def _drive(self, key: bytes, request: ModelRequest, on_tool_call: OnToolCall | None) -> Reply:
        asked = self._asked[key] = asyncio.get_running_loop().create_future()
        try:
            reply = await self._answer(key, request, on_tool_call)
            asked.set_result(reply)
            return reply
        except BackendError as error:
            asked.set_result(error)
            raise
        finally:
            del self._asked[key]
            if not asked.done():
                asked.set_result(None)

    async def _answer(self, key: bytes, request: ModelRequest, on_tool_call: OnToolCall | None) -> Reply:
        known = await self._beside(lambda: self._store.get(key))
        if known is not None:
            return _again(known, on_tool_call)
        found = None if self.once is None else await self.once.begin(f"answer-{key.hex()}")
        if isinstance(found, Found):
            reply = decode_reply(found.text)
            await self._keep(key, request, replace(reply, usage=reply.saved or Usage()))
            return _again(reply, on_tool_call)
        shown: Found | None = None
        try:
            reply = await self.inner.infer(request, on_tool_call)
            shown = Found(encode_reply(reply), ok=True)
        finally:
            if self.once is not None and found is not None:
                self.once.end(f"answer-{key.hex()}", found, shown, inf)
        await self._keep(key, request, reply)
        return reply

    def _keep(self, key: bytes, request: ModelRequest, reply: Reply) -> asyncio.Future[None]:
        return self._beside(lambda: self._store.put(key, self.name, request.shape.model, reply))

    def _key(self, request: ModelRequest) -> bytes:
        """Return the hash of everything that determines the answer. It includes the backend's name, because two servers
        may use one name for different models, and tool call ids, because templates may show them to the model."""
        shape = request.shape
        head = self._heads.get(shape)
        if head is None:
            head = self._heads[shape] = _head(shape, self.name)
        key = blake2b(head, digest_size=32)
        if request.client is not None:
            key.update(request.client.digest)
        if request.seed is not None:
            key.update(b"\nseed %d" % request.seed)
        for message in request.conversation.messages:
            key.update(_body(message))
        return key.digest()

    def _beside(self, work: Callable[[], T]) -> asyncio.Future[T]:
        return asyncio.get_running_loop().run_in_executor(self._thread, work)

    async def _close(self) -> None:
        if self._thread is not None:
            closing = self._beside(self._store.close)
            self._thread.shutdown(wait=False)  # work submitted before is still done
            self._thread = None
            await asyncio.shield(closing)


def _again(reply: Reply, on_tool_call: OnToolCall | None) -> Reply:
    """Return an answer for another caller with the same request: without usage, and with its tool calls reported."""
    report_calls(reply, on_tool_call)
    return replace(reply, usage=Usage(), first_token=None, saved=reply.saved or reply.usage)


def _for_another(error: BackendError) -> BackendError:
    """Return an error for another caller with the same request: without usage, which the first caller has paid."""
    same = copy(error)
    same.usage, same.paid_elsewhere = None, True
    return same


def _head(shape: RequestShape, backend: str) -> bytes:
    parts = {
        **{each.name: getattr(shape, each.name) for each in fields(shape)},
        "backend": backend,
        "stop": list(shape.stop),
        "tools": [[tool.name, tool.description, tool.parameters] for tool in shape.tools],
        "extra_body": dict(shape.extra_body),
    }
    return json.dumps(parts, sort_keys=True).encode()


def _body(message: Message) -> bytes:
    calls: JsonValue = [[call.id, call.name, call.arguments] for call in message.tool_calls]
    fields: list[JsonValue] = [message.role, content_json(message.content), calls, message.tool_call_id]
    if message.sealed is not None:
        fields += [message.sealed.wire, message.sealed.value]
    # JSON on its own line: two lists of messages never produce the same bytes.
    return b"\n" + json.dumps(fields).encode()
