"""The embedded engine as a Backend: real weights on this machine's CPU, without server, key or network once downloaded.

Owns the translation of requests to the engine process and of its answers, and resends requests when the process dies.
Batching, prefix sharing and grammars happen in the process; see design/embedded.md.
"""

from __future__ import annotations

import asyncio
import importlib.util
import logging
import os
import secrets
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self, cast
from urllib.parse import parse_qsl, unquote, urlsplit
from uuid import uuid4
from weakref import WeakKeyDictionary

import orjson
from pydantic import JsonValue

from batch_agent.backends.address import Address, check_known
from batch_agent.backends.base import Backend, Capabilities, ModelRequest, OnToolCall, Probe, RequestShape, text_only
from batch_agent.backends.http.wire import report_calls, written
from batch_agent.backends.local import weights
from batch_agent.backends.local.engine import KEPT, EngineKeeper, LoadedEngine, start_engine
from batch_agent.backends.local.grammar import CLOSE, OPEN, compile_turn, json_text
from batch_agent.blocking import in_thread
from batch_agent.errors import BackendError, ContextOverflow, InternalError, Rejected, SpecError, Truncated, Unavailable
from batch_agent.messages import Conversation, JsonObject, Message, Reply, TokenChance, ToolCall, ToolSpec, Usage

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


DEFAULT_MAX_TOKENS = 512
STARTS = 3  # processes that one request may use, including the first
SAMPLING = frozenset({"top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"})

log = logging.getLogger(__name__)

ChatMessage = dict[str, str]

ENGINE_PROGRAM = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from batch_agent.backends.local.child import main; main()"
)
ERRORS: dict[str, type[BackendError]] = {"context": ContextOverflow, "invalid": Rejected}


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
            native_schema=True,
            schema_with_tools=True,
            streaming=False,
            default_inflight=self._options.max_seqs,
            logprobs=True,
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
            await in_thread(self._keeper.keep, self._key, engine, self._options.keep)

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
        version = await in_thread(lambda: path.stat().st_mtime_ns if path.exists() else 0)  # of the file
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
        if "temperature" in sampling and ("rng_seed" not in sampling or request.seed is not None):
            seed = secrets.randbelow(2**31) if request.seed is None else request.seed % 2**31
            sampling = {**sampling, "rng_seed": seed}
        messages = chat_messages(request.conversation.messages, turn.instructions)
        answer = await self._ask(
            {
                "job": request.job_id,
                "messages": [dict[str, JsonValue](message) for message in messages],
                "grammar": turn.grammar,
                "max_tokens": turn.max_tokens,
                "stop": list(request.shape.stop),
                "sampling": sampling,
                "logprobs": request.shape.logprobs,
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
                told = json_text(shape.schema)
                instructions.append(f"Your answer must be JSON alone, valid against this JSON schema: {told}")
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
        told = None if answer.tokens is None else tuple(TokenChance(said.encode(), of) for said, of in answer.tokens)
        return Reply(text, usage=usage, reasoning=reasoning, first_token=answer.first_token, tokens=told)
    return Reply("", (call,), usage, reasoning, first_token=answer.first_token, finish_reason="tool_calls")


def _made_before(calls: Sequence[ToolCall], conversation: Conversation) -> bool:
    made = {(call.name, call.arguments) for message in conversation.messages for call in message.tool_calls}
    return any((call.name, call.arguments) in made for call in calls)


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


# Chat messages that any chat template accepts. Tools are described in the system message and their results are user
# messages, because a template may support neither. A call is repeated exactly as the model wrote it, so that turn n+1
# extends turn n.
def chat_messages(messages: Sequence[Message], instructions: str) -> list[ChatMessage]:
    """Return the chat messages. ``instructions``, the same for all requests of a shape, follow the system message."""
    out: list[ChatMessage] = []
    results: list[str] = []
    for message in messages:
        if message.role == "tool":
            results.append(f"<tool_response>\n{text_only(message)}\n</tool_response>")
            continue
        if results:
            out.append({"role": "user", "content": "\n".join(results)})
            results = []
        out.append({"role": message.role, "content": _content(message)})
    if results:
        out.append({"role": "user", "content": "\n".join(results)})
    return _instructed(out, instructions) if instructions else out


def _content(message: Message) -> str:
    calls = (
        f'{OPEN}{{"name": {json_text(call.name)}, "arguments": {call.arguments}}}{CLOSE}' for call in message.tool_calls
    )
    return "\n".join(part for part in (text_only(message), *calls) if part)


def _instructed(messages: list[ChatMessage], instructions: str) -> list[ChatMessage]:
    if messages and messages[0]["role"] == "system":
        first = {"role": "system", "content": f"{messages[0]['content']}\n\n{instructions}"}
        return [first, *messages[1:]]
    return [{"role": "system", "content": instructions}, *messages]


def describe_tools(tools: Sequence[ToolSpec]) -> str:
    lines = ["You can call these tools:"]
    lines += [f"- {tool.name}: {tool.description} Arguments: {json_text(tool.parameters)}" for tool in tools]
    lines.append(
        f'To call one, write {OPEN}{{"name": …, "arguments": …}}{CLOSE}. When you know enough, answer instead.'
    )
    return "\n".join(lines)


def read_call(text: str) -> ToolCall | None:
    """Return the tool call in ``text``, if it is one; the grammar has ensured its form."""
    body = text.strip()
    if not (body.startswith(OPEN) and body.endswith(CLOSE)):
        return None
    name, separator, rest = body[len(OPEN) : -len(CLOSE)].partition(', "arguments": ')
    name = name.strip().removeprefix('{"name": ').strip('"')
    if not separator or not rest.endswith("}"):
        return None
    return ToolCall(id=f"call_{uuid4().hex[:16]}", name=name, arguments=rest[:-1])


def split_thinking(text: str) -> tuple[str, str]:
    """Return the reasoning of the model and its answer. Qwen3 writes its reasoning between two tags."""
    thought, tag, answer = text.lstrip().partition("</think>")
    if not tag or not thought.startswith("<think>"):
        return "", text
    return thought.removeprefix("<think>").strip(), answer.lstrip()


def encode_line(message: JsonObject) -> bytes:
    """Return the line that the process reads."""
    return written(message) + b"\n"


class EngineDied(Exception):
    """The process ended with requests in flight, or before it was ready; the message says how."""


@dataclass(frozen=True, slots=True)
class EngineAnswer:
    text: str
    finish: str
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    first_token: float | None
    tokens: Sequence[tuple[str, float]] | None = None  # with their log-probabilities; None: not wanted


@dataclass(slots=True)
class _InFlight:
    answer: asyncio.Future[EngineAnswer]
    sent: float
    first_token: float | None = None


class EngineProcess(asyncio.Protocol):
    """The connection of one event loop to an engine, from ``start`` or ``attach`` to its end or to ``detach``."""

    def __init__(self, engine: LoadedEngine) -> None:
        self._loop = asyncio.get_running_loop()
        self._engine = engine
        self._in_flight: dict[int, _InFlight] = {}
        self._fatal = ""
        self._ready: asyncio.Future[bool] = self._loop.create_future()  # False: the process ended before it was ready
        if engine.ready:
            self._ready.set_result(True)
        self._output: asyncio.ReadTransport
        self._input: asyncio.WriteTransport
        self._closed: asyncio.Future[None] = self._loop.create_future()  # nothing more is read
        self._input_closed: asyncio.Future[None] = self._loop.create_future()
        self._detached = False

    @classmethod
    async def start(cls, program: str, config: JsonObject) -> Self:
        """Start the process. It is still loading the model when this returns. Cancelled, it ends what it started."""
        starting = start_engine(program, config)
        try:
            return await cls.attach(await asyncio.shield(asyncio.wrap_future(starting)))
        except OSError as error:
            raise EngineDied(f"cannot be started: {error}") from error
        except BaseException:
            starting.add_done_callback(_end_started)
            raise

    @classmethod
    async def attach(cls, engine: LoadedEngine) -> Self:
        """Connect to a running process. Its own pipes stay open after ``detach``."""
        self = cls(engine)
        assert engine.process.stdin is not None and engine.process.stdout is not None
        writable = os.fdopen(os.dup(engine.process.stdin.fileno()), "wb", 0)
        self._input, _ = await self._loop.connect_write_pipe(lambda: _Input(self._input_closed), writable)
        try:
            output = os.fdopen(os.dup(engine.process.stdout.fileno()), "rb", 0)
            self._output, _ = await self._loop.connect_read_pipe(lambda: self, output)
        except BaseException:
            self._input.close()
            raise
        return self

    @property
    def alive(self) -> bool:
        return not self._closed.done()

    @property
    def pid(self) -> int:
        return self._engine.process.pid

    async def wait_ready(self) -> None:
        if not await asyncio.shield(self._ready):
            raise EngineDied(self._fatal)

    async def ask(self, request: JsonObject) -> EngineAnswer:
        """Send a request and return its answer. Cancelling this cancels the request in the engine."""
        if not self.alive:
            raise EngineDied(self._fatal)
        number = next(self._engine.ids)
        entry = _InFlight(self._loop.create_future(), self._loop.time())
        self._in_flight[number] = entry
        self._send({"id": number, **request})
        try:
            return await entry.answer
        finally:
            if self._in_flight.pop(number, None) is not None:
                self._send({"cancel": number})

    async def detach(self) -> LoadedEngine:
        """Disconnect and return the engine. Requests in flight are cancelled and fail."""
        self._detached = True
        for number in self._in_flight:
            self._send({"cancel": number})
        self._input.close()  # sends what was written before
        self._output.close()
        await asyncio.shield(self._closed)
        await asyncio.shield(self._input_closed)
        return self._engine

    def kill(self) -> None:
        """End the process without waiting for requests."""
        self._engine.end()

    async def close(self) -> None:
        """End the process and wait until it has ended."""
        try:
            await self.detach()
        finally:  # also if this is cancelled
            await in_thread(self._engine.end)

    def _send(self, message: JsonObject) -> None:
        if not self._input.is_closing():
            self._input.write(encode_line(message))

    # Called by asyncio

    def data_received(self, data: bytes) -> None:
        unread = self._engine.unread
        unread += data
        *lines, rest = unread.split(b"\n")
        unread[:] = rest
        for line in lines:
            self._receive(orjson.loads(line))

    def connection_lost(self, exc: Exception | None) -> None:
        """The process ended, or we detached."""
        self._closed.set_result(None)
        self._input.close()
        if not self._ready.done():
            self._ready.set_result(False)
        entries = [entry for entry in self._in_flight.values() if not entry.answer.done()]
        self._in_flight.clear()
        if self._detached:
            self._fatal = "the run disconnected from it"
        else:
            self._fatal = self._fatal or self._engine.how_it_ended()
            self._engine.end()
        for entry in entries:
            entry.answer.set_exception(EngineDied(self._fatal))

    def _receive(self, message: JsonObject) -> None:
        if "ready" in message:
            self._engine.ready = True
            self._ready.set_result(True)
        elif "fatal" in message:
            self._last_words(message)
        elif (entry := self._in_flight.get(cast(int, message["id"]))) is None or entry.answer.done():
            return
        elif "first" in message:
            entry.first_token = self._loop.time() - entry.sent
        else:
            del self._in_flight[cast(int, message.pop("id"))]
            _settle(entry, message)

    def _last_words(self, message: JsonObject) -> None:
        self._fatal = str(message["fatal"]).strip()
        if "grammar" not in self._fatal:
            return
        # If they were sent again, the next process would die in the same way, with all other requests.
        for number in cast(list[int], message["suspects"]):
            if entry := self._in_flight.pop(number, None):
                entry.answer.set_exception(Rejected(f"the engine refused the schema's grammar: {self._fatal}"))


def _end_started(starting: Future[LoadedEngine]) -> None:
    if starting.exception() is None:
        starting.result().end()


class _Input(asyncio.BaseProtocol):
    def __init__(self, closed: asyncio.Future[None]) -> None:
        self._closed = closed

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._closed.done():
            self._closed.set_result(None)


def _settle(entry: _InFlight, message: JsonObject) -> None:
    if "error" in message:
        entry.answer.set_exception(ERRORS[str(message["error"])](str(message["message"])))
        return
    entry.answer.set_result(EngineAnswer(first_token=entry.first_token, **cast("dict[str, Any]", message)))
