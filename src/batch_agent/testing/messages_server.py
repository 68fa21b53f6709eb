"""``MessagesServer``: a scripted server with Anthropic's ``/v1/messages`` that refuses what the API refuses.

Scripts and replies are those of ScriptedServer. It has a prompt cache with the API's rules, so that usage shows the
effect of a client's ``cache_control`` marks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any, ClassVar, cast

import orjson
from aiohttp import web

from batch_agent.backends.http.wire import objects_of
from batch_agent.backends.simulated.tokens import count_tokens, encode
from batch_agent.door import json_response
from batch_agent.messages import JsonObject, Usage
from batch_agent.testing.messages_rules import wrong_with
from batch_agent.testing.messages_wire import MessagesRequest, MessagesWire, blocks_of, error_object, signature
from batch_agent.testing.replies import Say, ScriptedReply
from batch_agent.testing.request import Refusal, Request
from batch_agent.testing.script import Script
from batch_agent.testing.server import ScriptedServer
from batch_agent.testing.wire import Wire

LOOK_BACK = 20  # blocks before a mark that are searched for an older entry


class PromptCache:
    """Entries stored at marks, and found by later requests with the same prefix."""

    def __init__(self, smallest: int) -> None:
        self._smallest = smallest
        self._kept: set[bytes] = set()

    def usage(self, body: JsonObject) -> Usage:
        """Return the tokens of the prompt: all, those found, and those newly stored."""
        digest, tokens, places = hashlib.sha256(str(body.get("model")).encode()), 0, []
        for block in _in_order(body):
            bare = orjson.dumps({name: part for name, part in block.items() if name != "cache_control"})
            digest.update(bare)
            tokens += count_tokens(encode(bare.decode()))
            places.append((digest.digest(), tokens, "cache_control" in block))
        marks = [place for place, (_, length, marked) in enumerate(places) if marked and length >= self._smallest]
        near = [place for mark in marks for place in range(max(0, mark - LOOK_BACK), mark + 1)]
        read = max((places[place][1] for place in near if places[place][0] in self._kept), default=0)
        self._kept |= {places[mark][0] for mark in marks}
        written = max((places[mark][1] for mark in marks), default=read)
        return Usage(prompt_tokens=tokens, cached_tokens=read, cache_write_tokens=max(0, written - read))


class MessagesServer(ScriptedServer):
    """``cached_from``: the shortest prefix that is cached, in tokens."""

    paths: ClassVar[Sequence[str]] = ("/v1/messages",)
    request_type: ClassVar[type[Request]] = MessagesRequest

    def __init__(
        self,
        script: Script | None = None,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        models: Sequence[str] | None = None,
        api_key: str | None = None,
        metrics: Callable[[], str] | None = None,
        cached_from: int = 1024,
    ) -> None:
        super().__init__(script, host=host, port=port, models=models, api_key=api_key, metrics=metrics)
        self._cache = PromptCache(cached_from)
        self._thoughts: dict[str, list[JsonObject]] = {}  # that led to a call, by its id

    @property
    def backend_url(self) -> str:
        return f"anthropic://{self.address}"

    def wrong_with(self, request: Request) -> Refusal | None:
        return wrong_with(cast(MessagesRequest, request), self._models, self._thoughts)

    def wire(self, request: Request) -> Wire:
        return MessagesWire(cast(MessagesRequest, request))

    def refuse(self, status: int, message: str, param: str | None = None) -> web.Response:
        return json_response(error_object(status, message), status)

    def given_key(self, headers: Mapping[str, str]) -> str:
        return headers.get("x-api-key") or super().given_key(headers)

    def model_card(self, name: str) -> JsonObject:
        return {"type": "model", "id": name, "display_name": name, "created_at": "1970-01-01T00:00:00Z"}

    def model_list(self, cards: list[JsonObject]) -> JsonObject:
        last = cards[-1]["id"] if cards else None
        return {"data": [*cards], "has_more": False, "first_id": cards[0]["id"] if cards else None, "last_id": last}

    async def respond(self, request: Request) -> ScriptedReply:
        reply = await super().respond(request)
        prompt = self._cache.usage(request.body)
        if not isinstance(reply, Say):
            return reply
        if reply.reasoning:
            thought: JsonObject = {"type": "thinking", "thinking": reply.reasoning}
            block = thought | {"signature": signature(reply.reasoning)}
            for index, use in enumerate(reply.calls):
                self._thoughts[use.as_call(request.number, index).id] = [block]
        said = reply.text + reply.reasoning + "".join(str(use.arguments) for use in reply.calls)
        spoken = Usage(0, 0, count_tokens(encode(said)) + 1, count_tokens(encode(reply.reasoning)))
        given: dict[str, Any] = {each.name: getattr(reply, each.name) for each in fields(Say)}  # also of CallTools
        return Say(**{**given, "usage": prompt + spoken if reply.usage is None else reply.usage})


def _in_order(body: JsonObject) -> Iterator[JsonObject]:
    """Yield the blocks in the API's order: tools, system, messages."""
    yield from blocks_of(body.get("tools"))
    yield from blocks_of(body.get("system"))
    for message in objects_of(body.get("messages")):
        for block in blocks_of(message.get("content")):
            yield {"role": message.get("role"), **block}
