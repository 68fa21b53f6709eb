"""The embedded engine as a Backend: real weights on this machine's CPU, without server, key or network once downloaded.

Owns the translation of requests to the engine process and of its answers, and resends requests when the process dies.
Batching, prefix sharing and grammars happen in the process; see design/embedded.md.
"""

from __future__ import annotations

import asyncio
import importlib.util
import logging
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Self
from weakref import WeakKeyDictionary

from pydantic import JsonValue

from batch_agent.backends.address import Address, check_known
from batch_agent.backends.base import Backend, Capabilities, ModelRequest, OnToolCall, Probe, RequestShape
from batch_agent.backends.http.wire import report_calls
from batch_agent.backends.local import weights
from batch_agent.backends.local.keeper import KEPT, EngineKeeper
from batch_agent.backends.local.options import EngineOptions, parse_url
from batch_agent.backends.local.process import ENGINE_PROGRAM, EngineAnswer, EngineDied, EngineProcess
from batch_agent.backends.local.prompt import chat_messages, describe_schema, describe_tools, read_call, split_thinking
from batch_agent.backends.local.toolgrammar import OPEN, compile_turn
from batch_agent.blocking import in_thread
from batch_agent.errors import InternalError, SpecError, Truncated, Unavailable
from batch_agent.messages import Conversation, JsonObject, Reply, ToolCall, Usage

DEFAULT_MAX_TOKENS = 512
STARTS = 3  # processes that one request may use, including the first
SAMPLING = frozenset({"top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"})

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Turn:
    """What all requests of one shape share, computed once."""

    grammar: str | None
    instructions: str
    max_tokens: int
    sampling: JsonObject
    unforced: str  # the part that no grammar enforces
    answering: RequestShape | None  # the same shape without the forced tool choice, if there was one


class LocalBackend(Backend):
    """The embedded engine. ``async with`` starts its process, or reuses the idle process of an earlier run. Entering
    again shares the process. The last exit keeps it loaded for ``keep`` seconds, or ends it."""

    def __init__(self, options: EngineOptions, program: str = ENGINE_PROGRAM, keeper: EngineKeeper = KEPT) -> None:
        self._options = options
        self._keeper = keeper
        self._program = program
        self._entered = 0
        self._lock = asyncio.Lock()
        self._process: EngineProcess | None = None
        self._key = ""  # what it was started with
        self._turns: WeakKeyDictionary[RequestShape, _Turn] = WeakKeyDictionary()
        self._warned: set[str] = set()

    @property
    def name(self) -> str:
        return self._options.url

    @property
    def capabilities(self) -> Capabilities:
        # A tool call ends the answer, so there is nothing to report earlier.
        return Capabilities(
            native_schema=True, schema_with_tools=True, streaming=False, default_inflight=self._options.max_seqs
        )

    @property
    def pid(self) -> int | None:
        """Return the id of the engine process, while it runs."""
        return self._process.pid if self._process is not None and self._process.alive else None

    async def models(self) -> list[str]:
        return [self._options.model]

    async def probe(self, endpoint: str = "") -> Probe:
        if not self._entered:
            return Probe("unknown", "the backend is not open, so its engine process does not run")
        if self.pid is None:
            return Probe("down", "its engine process has ended", (self._options.model,))
        return Probe("up", models=(self._options.model,))

    async def __aenter__(self) -> Self:
        if self._entered == 0:
            self._lock = asyncio.Lock()  # of the event loop that runs now
        self._entered += 1
        try:
            await self._engine()
        except EngineDied as death:
            await self._leave()
            raise SpecError(f"{self.name} cannot be loaded: {death}") from None
        except BaseException:
            await self._leave()
            raise
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self._leave()

    async def _leave(self) -> None:
        self._entered -= 1
        if self._entered == 0 and self._process is not None:
            process, self._process = self._process, None
            try:
                engine = await process.detach()
            except BaseException:  # cancelled: it is not known what of the last requests reached the engine
                process.kill()
                raise
            await in_thread(partial(self._keeper.keep, self._key, engine, self._options.keep))

    async def _engine(self) -> EngineProcess:
        """Return the running process, ready for requests. Starts it if needed."""
        async with self._lock:
            if self._entered == 0:
                raise Unavailable(f"{self.name} is closed")
            process = self._process
            if process is None or not process.alive:
                process = await self._start(await self._configuration())
                if self._entered == 0:  # the last user left meanwhile
                    await process.close()
                    raise Unavailable(f"{self.name} is closed")
                self._process = process
        await process.wait_ready()
        return process

    async def _start(self, configuration: JsonObject) -> EngineProcess:
        self._key = repr((sorted(configuration.items()), self._program))
        kept = self._keeper.take(self._key)
        if kept is not None:
            try:
                return await EngineProcess.attach(kept)
            except BaseException:
                kept.end()
                raise
        await in_thread(self._keeper.release)  # an engine with other options: its memory is needed
        return await EngineProcess.start(self._program, configuration)

    async def _configuration(self) -> JsonObject:
        path = self._options.path
        if path is None:
            known = weights.find(self._options.model)
            if known is None:
                raise InternalError(f"{self.name} has neither a path nor a known name")
            if not weights.is_present(known):
                size = f", {known.size_bytes // 10**6} MB" if known.size_bytes else ""
                log.warning("downloading the weights of %s%s; later runs use the stored file", known.name, size)
            path = await asyncio.to_thread(weights.fetch, known)
        options = self._options
        version = await in_thread(partial(_version, path))
        return {
            "path": str(path),
            "version": version,
            "threads": options.threads,
            "kv_gb": options.kv_gb,
            "max_seqs": options.max_seqs,
        }

    def check(self, shape: RequestShape) -> None:
        unforced = self._turn(shape).unforced
        if unforced and unforced not in self._warned:
            self._warned.add(unforced)
            log.warning("not enforced by the grammar, only validated: %s", unforced)

    async def infer(self, request: ModelRequest, on_tool_call: OnToolCall | None = None) -> Reply:
        turn = self._turn(request.shape)
        if turn.answering is not None and request.turns_left == 1:
            turn = self._turn(turn.answering)  # a tool call in the last turn would be lost
        reply = await self._infer(turn, request)
        if turn.answering is not None and _made_before(reply.tool_calls, request.conversation):
            # A small model that sees the result of its tool call repeats the same call as long as it is allowed to.
            try:
                again = await self._infer(self._turn(turn.answering), request)
            except Truncated as error:
                error.usage = reply.usage + (error.usage or Usage())
                raise
            reply = replace(again, usage=reply.usage + again.usage, first_token=reply.first_token)
        report_calls(reply, on_tool_call)
        return reply

    async def _infer(self, turn: _Turn, request: ModelRequest) -> Reply:
        sampling = turn.sampling
        if "temperature" in sampling and "rng_seed" not in sampling:
            sampling = {**sampling, "rng_seed": secrets.randbelow(2**31)}
        messages = chat_messages(request.conversation.messages, turn.instructions)
        answer = await self._ask(
            {
                "job": request.job_id,
                "messages": [dict[str, JsonValue](message) for message in messages],
                "grammar": turn.grammar,
                "max_tokens": turn.max_tokens,
                "stop": list(request.shape.stop),
                "sampling": sampling,
            }
        )
        return _reply(answer)

    async def _ask(self, request: JsonObject) -> EngineAnswer:
        """Send the request, and again to a new process if the process died."""
        deaths: list[str] = []
        while len(deaths) < STARTS:
            try:
                process = await self._engine()
                return await process.ask(request)
            except EngineDied as death:
                deaths.append(str(death))
                log.warning("the engine process of %s died: %s", self.name, death)
        raise Unavailable(f"the engine process died {len(deaths)} times with this request in flight: {deaths[-1]}")

    def _turn(self, shape: RequestShape) -> _Turn:
        turn = self._turns.get(shape)
        if turn is None:
            if shape.model not in ("", self._options.model):  # "" before the start of a run that names no model
                raise SpecError(f"model: {self.name} has {self._options.model!r}, not {shape.model!r}")
            max_tokens = shape.max_tokens or DEFAULT_MAX_TOKENS
            grammar = compile_turn(shape, max_tokens)
            instructions = [describe_tools(shape.tools)] if shape.tools else []
            if shape.schema is not None and grammar.schema_unforced:
                instructions.append(describe_schema(shape.schema))
            free = shape.tools and shape.tool_choice in (None, "auto")
            turn = _Turn(
                grammar=grammar.text,
                instructions="\n\n".join(instructions),
                max_tokens=max_tokens,
                sampling=_sampling(shape),
                unforced=grammar.unforced,
                answering=replace(shape, tool_choice="none") if free else None,
            )
            self._turns[shape] = turn
        return turn


def _sampling(shape: RequestShape) -> JsonObject:
    """Return the engine's generation options. A temperature of 0 or None means greedy."""
    check_known(shape.extra_body, sorted(SAMPLING), "extra_body: local:// has no")
    for name, value in shape.extra_body.items():
        if isinstance(value, bool) or not isinstance(value, int if name == "top_k" else int | float):
            raise SpecError(f"extra_body: {name} must be a {'whole ' if name == 'top_k' else ''}number, not {value!r}")
    out: JsonObject = dict(shape.extra_body)
    if shape.temperature:
        out.update(do_sample=True, temperature=shape.temperature)
        if shape.top_p is not None:
            out["top_p"] = shape.top_p
        if shape.seed is not None:
            out["rng_seed"] = shape.seed % 2**31
    return out


def _reply(answer: EngineAnswer) -> Reply:
    usage = Usage(answer.prompt_tokens, answer.cached_tokens, answer.completion_tokens)
    if answer.finish == "length":
        message = f"the answer was cut off after {answer.completion_tokens} tokens: raise max_tokens"
        raise Truncated(message, text=answer.text, usage=usage, in_call=answer.text.lstrip().startswith(OPEN))
    reasoning, text = split_thinking(answer.text)
    call = read_call(text)
    if call is None:
        return Reply(text, usage=usage, reasoning=reasoning, first_token=answer.first_token)
    return Reply("", (call,), usage, reasoning, first_token=answer.first_token, finish_reason="tool_calls")


def _made_before(calls: Sequence[ToolCall], conversation: Conversation) -> bool:
    made = {(call.name, call.arguments) for message in conversation.messages for call in message.tool_calls}
    return any((call.name, call.arguments) in made for call in calls)


def _version(path: Path) -> int:
    """Return a number that changes when the file changes."""
    return path.stat().st_mtime_ns if path.exists() else 0


def require_engine() -> None:
    """Raise a SpecError with the install command, unless the engine is installed."""
    if importlib.util.find_spec("openvino_genai") is None:
        raise SpecError(
            "local://, the backend when none is given, needs the package openvino-genai: pip install openvino-genai; "
            "or give backend= the URL of a server"
        )


def from_url(url: str) -> LocalBackend:
    """Return the backend for a ``local://…`` URL. Nothing is downloaded or started yet."""
    require_engine()
    return LocalBackend(parse_url(url))


def from_address(address: Address) -> LocalBackend:
    url = address.url.geturl()
    return from_url(url) if address.sends else LocalBackend(parse_url(url))
