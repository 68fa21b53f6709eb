"""``-v`` and ``--log-file``: a log of what was sent to the model and what came back.

The backend is wrapped in one that logs each exchange: in short for people, in full as lines of JSON for a file. API
keys belong to the inner backend and never pass here. A key that a prompt or an answer contains is redacted.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import BinaryIO

from batch_agent.backends.base import Backend, Capabilities, ModelRequest, OnToolCall, RequestShape
from batch_agent.backends.forwarding import ForwardingBackend
from batch_agent.cli.output.streams import say
from batch_agent.errors import BackendError, explained
from batch_agent.files.results import to_json
from batch_agent.messages import JsonObject, Message, Reply
from batch_agent.observe.text import duration, harmless
from batch_agent.record.private import private

SECRET_NAMES = re.compile(r"(KEY|TOKEN|SECRET|PASSWORD)S?$", re.IGNORECASE)
SHORTEST_SECRET = 8
SHOWN_CHARACTERS = 200


class RequestLog:
    """The log of one command: on the terminal if ``verbose``, and in ``log_file`` if given. ``files`` closes it."""

    def __init__(self, *, verbose: bool, log_file: str | None, files: ExitStack) -> None:
        self._verbose = verbose
        self._file: BinaryIO | None = None
        if log_file is not None:
            with explained(f"cannot write the log file {Path(log_file)}"):
                self._file = files.enter_context(open(log_file, "ab", buffering=0, opener=private))  # noqa: SIM115

    def wrap(self, backend: Backend, api_key: str | None) -> Backend:
        """Return a backend that logs its exchanges, or the same backend if no log is wanted."""
        if not self._verbose and self._file is None:
            return backend
        named = {value for name, value in os.environ.items() if SECRET_NAMES.search(name)}
        secrets = [value for value in named | {api_key or ""} if len(value) >= SHORTEST_SECRET]
        secrets.sort(key=len, reverse=True)
        return LoggedBackend(backend, partial(self._tell, secrets))

    def _tell(self, secrets: Sequence[str], exchange: JsonObject) -> None:
        if self._verbose:
            for line in _words(exchange):
                say(harmless(_cut_out(secrets, line), SHOWN_CHARACTERS))
        if self._file is not None:
            line = to_json({"at": datetime.now(UTC).isoformat(timespec="milliseconds"), **exchange}).decode()
            with suppress(OSError):  # a full disk: a failing log must not end the run
                self._file.write(_cut_out(secrets, line).encode() + b"\n")


class LoggedBackend(ForwardingBackend):
    """Calls ``tell`` with each exchange with the inner backend."""

    def __init__(self, inner: Backend, tell: Callable[[JsonObject], None]) -> None:
        super().__init__(inner)
        self._tell = tell

    @property
    def capabilities(self) -> Capabilities:
        return replace(self.inner.capabilities, batch=False)

    infer_batch = Backend.infer_batch  # each exchange is logged separately

    async def infer(self, request: ModelRequest, on_tool_call: OnToolCall | None = None) -> Reply:
        messages = request.conversation.messages
        turn = 1 + sum(message.role == "assistant" for message in messages)
        who: JsonObject = {"row": request.job_id, "turn": turn}
        self._tell({**who, "sent": [message.to_dict() for message in _new(messages)], **_shape(request.shape, turn)})
        began = time.monotonic()
        try:
            reply = await self.inner.infer(request, on_tool_call)
        except BackendError as error:
            seconds = round(time.monotonic() - began, 3)
            self._tell({**who, "seconds": seconds, "error": {"type": error.type, "message": str(error)}})
            raise
        answer = Message("assistant", reply.text, reply.tool_calls, reasoning=reply.reasoning).to_dict()
        tokens: JsonObject = {"in": reply.usage.prompt_tokens, "out": reply.usage.completion_tokens}
        seconds = round(time.monotonic() - began, 3)
        self._tell({**who, "seconds": seconds, "received": answer, "tokens": tokens})
        return reply


def _new(messages: Sequence[Message]) -> Sequence[Message]:
    """Return the messages that were not sent to the model before."""
    answers = [place for place, message in enumerate(messages) if message.role == "assistant"]
    return messages[answers[-1] + 1 :] if answers else messages


def _shape(shape: RequestShape, turn: int) -> JsonObject:
    """Return the options of the request, which are logged once per row."""
    if turn > 1:
        return {}
    said: JsonObject = {"model": shape.model}
    for name in ("max_tokens", "temperature", "top_p", "seed", "schema"):
        if getattr(shape, name) is not None:
            said[name] = getattr(shape, name)
    return {"request": {**said, "tools": [tool.name for tool in shape.tools]}}


def _cut_out(secrets: Sequence[str], text: str) -> str:
    for secret in secrets:
        text = text.replace(secret, "[redacted]")
    return text


def _words(exchange: JsonObject) -> Iterable[str]:
    who = f"row {exchange['row']}, turn {exchange['turn']}"
    seconds = exchange.get("seconds")
    took = f", {duration(seconds)}" if isinstance(seconds, int | float) else ""
    match exchange:
        case {"sent": list(messages)}:
            for message in messages:
                if isinstance(message, dict):
                    yield f"> {who}: {message['role']}: {message['content']}"
        case {"received": dict(answer)}:
            calls = answer.get("tool_calls")
            names = [_call(call) for call in calls] if isinstance(calls, list) else []
            yield f"< {who}{took}: {' '.join([str(answer['content']), *names]).strip()}"
        case {"error": dict(error)}:
            yield f"! {who}{took}: {error['type']}: {error['message']}"


def _call(call: object) -> str:
    function = call.get("function") if isinstance(call, dict) else None
    return f"{function['name']}({function['arguments']})" if isinstance(function, dict) else ""
