"""The ``/chat/completions`` wire: OpenAI, and every server that speaks its dialect (vLLM, SGLang, llama.cpp, Ollama …).

``AnswerStream`` and ``read_answer`` read answers, ``OpenAIServer`` has what these servers share beside the wire,
``OpenAIBackend`` writes requests, ``schema`` writes the schemas, and ``http/backend`` sends requests. A body is head,
messages and tail. The head is encoded once per RequestShape, each message once per conversation, the shared ones once
for all agents; the tail has fields of one turn.
"""

from __future__ import annotations

import asyncio
import logging
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Self, TypeAlias, cast
from weakref import WeakKeyDictionary

import orjson
from pydantic import JsonValue

from batch_agent.backends.base import Capabilities, ClientBody, ModelRequest, OnToolCall, RequestShape
from batch_agent.backends.http.backend import HttpBackend, HttpClient, Route, may_be_unknown, no_such_model, read_models
from batch_agent.backends.http.wire import (
    LARGEST_COUNT,
    EventReader,
    Faults,
    Naming,
    counted,
    echoed,
    object_of,
    string_of,
    usage_of,
    written,
    written_options,
)
from batch_agent.backends.openai.providers import STANDARD, Dialect, check_options
from batch_agent.backends.openai.schema import unwrapped
from batch_agent.backends.schema.visitor import blamed, is_kept
from batch_agent.errors import BackendError, Rejected, SpecError, Truncated
from batch_agent.http.transport import Transport
from batch_agent.messages import (
    JsonObject,
    Message,
    Part,
    Reply,
    Sealed,
    TokenChance,
    ToolCall,
    Usage,
    content_json,
    content_text,
    images_of,
)
from batch_agent.value_type import lazy_property

WIRE = "chat"
SIGNATURES = "extra_content"  # field of a call


@dataclass(frozen=True, slots=True)
class Unsealed:
    fields: JsonObject = field(default_factory=dict)  # of the message
    signatures: JsonObject = field(default_factory=dict)  # of its calls, by id

    def of_call(self, call_id: str) -> JsonObject:
        return {SIGNATURES: self.signatures[call_id]} if call_id in self.signatures else {}


NOTHING = Unsealed()


def sealed_calls(calls: Sequence[ToolCall], signatures: Iterable[object]) -> Sealed | None:
    """Return the sealed signatures of an answer's calls, by call id."""
    kept: JsonObject = {
        call.id: value for call, value in zip(calls, signatures, strict=True) if isinstance(value, dict)
    }
    return Sealed(WIRE, {"signatures": kept}) if kept else None


def sealed_with(sealed: Sealed | None, reasoning: str) -> Sealed:
    before = sealed.value if sealed is not None and isinstance(sealed.value, dict) else {}
    return Sealed(WIRE, before | {"fields": {"reasoning_content": reasoning}})


def opened(sealed: Sealed | None) -> Unsealed:
    if sealed is None or sealed.wire != WIRE or not isinstance(sealed.value, dict):
        return NOTHING
    fields, signatures = sealed.value.get("fields"), sealed.value.get("signatures")
    return Unsealed(
        fields if isinstance(fields, dict) else {},
        signatures if isinstance(signatures, dict) else {},
    )


_CUT = {"length", "max_tokens", "max_output_tokens", "model_length"}
ABORTED = {"abort", "aborted", "cancelled", "error", "insufficient_system_resource"}
_FILTERED = {"content_filter"}
_COMPLETE = ("stop", "tool_calls")
_CACHE_WRITES = ("cache_write_tokens", "cache_creation_tokens", "created_cache_tokens")


def read_answer(body: bytes, naming: Naming) -> Reply:
    """Return the Reply in an answer of ``/chat/completions``. Equivalent forms are accepted: null for an empty list, an
    object for JSON text, parts for text, missing ids. Raises BackendError for an incomplete answer: cut, aborted,
    filtered, empty, or an error object."""
    faults = naming.faults
    document = object_of(body, faults)
    choices = document.get("choices")
    if ("error" in document or not choices) and (error := error_in(document)):
        raise faults.reported(error)
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
        raise faults.bad(f"the answer has no choices: {faults.clean(body.decode('utf-8', 'replace'))}")
    choice = choices[0]
    if error := choice.get("error"):
        raise faults.reported(error)
    message = choice.get("message")
    if not isinstance(message, dict):
        raise faults.bad("the answer's choice has no message")
    content, model = message.get("content"), document.get("model")
    text = (content if isinstance(content, str) else text_in(content, faults)) or string_of(message.get("refusal"))
    finish = choice.get("finish_reason")
    if finish not in _COMPLETE and (finish := _reason(finish)) is None:
        raise faults.bad("the answer has no finish_reason, so it may be incomplete", text=text)
    usage = read_usage(document.get("usage"))
    items = _call_items(message, faults)
    if finish != "stop":
        check_finish(finish, text, bool(items), usage, faults)
    calls = tuple([naming.call(*_call_fields(item, faults)) for item in items]) if items else ()
    sealed = sealed_calls(calls, signatures) if items and any(signatures := [*map(_signature, items)]) else None
    named = model if isinstance(model, str) else ""
    # Without a call, because most requests do not want them.
    tokens = read_tokens([choice["logprobs"]]) if "logprobs" in choice and choice["logprobs"] is not None else None
    return Reply(text, calls, usage, _reasoning(message), None, finish, None, sealed, None, named, tokens)


class AnswerStream(EventReader):
    """Reads a streamed answer. A call is complete when its JSON object closes, or when the answer ends well; pieces of
    several calls may arrive in any order."""

    def __init__(self, naming: Naming, on_tool_call: OnToolCall, clock: Callable[[], float], said: list[str]) -> None:
        super().__init__(naming, on_tool_call, clock, said)
        self._reasoning: list[str] = []
        self._started: list[_CallInProgress] = []
        self._latest: dict[object, _CallInProgress] = {}  # by the server's index; None: the latest of all
        self._dispatched: dict[object, str] = {}  # ids of calls reported whole, by the server's index
        self._usage: JsonValue = None
        self._finish: str | None = None
        self._model = ""
        self._logprobs: list[JsonValue] = []

    def finish(self) -> Reply:
        self._close()
        if self._finish is None:
            raise self._unfinished()
        usage = read_usage(self._usage)
        check_finish(self._finish, self._so_far, bool(self._started), usage, self._faults)
        calls = tuple(self._settle(call) for call in self._started)
        sealed = sealed_calls(calls, [begun.signature for begun in self._started]) if calls else None
        reasoning = "".join(self._reasoning)
        timed = self._first_token, self._finish
        tokens = read_tokens(self._logprobs) if self._logprobs else None
        return Reply(self._so_far, calls, usage, reasoning, *timed, sealed=sealed, model=self._model, tokens=tokens)

    def _event(self, name: str, chunk: JsonObject) -> None:
        # Runs for every token, so rare fields are tested before anything is created.
        if name == "tool_call_dispatch":
            self._dispatch(chunk)
            return
        if ("error" in chunk or chunk.get("object") == "error") and (error := error_in(chunk)):
            raise self._faults.reported(error)
        if usage := chunk.get("usage"):
            self._usage = usage
        choices = chunk.get("choices")
        for choice in choices if isinstance(choices, list) else ():
            # Several choices come only if the user's extra_body requested them; the first is the answer.
            if isinstance(choice, dict) and not choice.get("index"):
                if error := choice.get("error"):
                    raise self._faults.reported(error)
                delta = choice.get("delta")
                if isinstance(delta, dict):
                    self._delta(delta)
                if "logprobs" in choice and (told := choice["logprobs"]):
                    self._logprobs.append(told)
                if finish := choice.get("finish_reason"):
                    self._finish = _reason(finish) or self._finish
                    self._model = string_of(chunk.get("model"))

    def _delta(self, delta: JsonObject) -> None:
        content = delta.get("content")
        if len(delta) == 1 and content and isinstance(content, str) and self._first_token is not None:
            self._said.append(content)  # the most common event
            return
        text = text_in(content, self._faults) or string_of(delta.get("refusal"))
        reasoning = _reasoning(delta)
        items = _call_items(delta, self._faults)
        if text or reasoning or items:
            self._begun()
        if text:
            self._said.append(text)
        if reasoning:
            self._reasoning.append(reasoning)
        for item in items:
            self._call_delta(item)

    def _dispatch(self, event: JsonObject) -> None:
        """Handle a whole call that the server sends before the deltas of the call (NVIDIA Dynamo). The deltas that
        follow add nothing."""
        call = event.get("tool_call")
        if isinstance(call, dict) and not event.get("choice_index"):
            number, (call_id, name, _) = _number(call), _call_fields(call, self._faults)
            if name and (number not in self._latest or self._latest[number].id != call_id):
                self._call_delta(call)
                self._dispatched[number] = call_id

    def _call_delta(self, item: JsonValue) -> None:
        call_id, name, arguments = _call_fields(item, self._faults)
        number = _number(item)
        if number in self._dispatched and call_id in ("", self._dispatched[number]):
            return
        call = self._latest.get(number)
        if call is None or call.is_over(call_id, name, arguments):
            call = self._latest[number] = self._latest[None] = _CallInProgress()
            self._started.append(call)
        call.id = call.id or call_id
        call.name = call.name or name
        call.signature = call.signature or _signature(item)
        call.extend(arguments)
        if call.closed and call.name:
            self._settle(call)

    def _settle(self, call: _CallInProgress) -> ToolCall:
        """Report a complete call."""
        if call.done is None:
            call.done = self._naming.call(call.id, call.name, call.arguments)
            self._on_tool_call(call.done)
        return call.done


class _CallInProgress:
    """The fragments of one call, and whether its JSON object has closed. Text after the object is not part of it."""

    _MARKS = re.compile(r'\\.?|["{}\[\]]', re.DOTALL)
    __slots__ = ("_depth", "_escaped", "_in_string", "_pieces", "closed", "done", "id", "name", "signature")

    def __init__(self) -> None:
        self.id = ""
        self.name = ""
        self.closed = False
        self.done: ToolCall | None = None
        self.signature: JsonValue = None
        self._pieces: list[str] = []
        self._depth = 0
        self._in_string = False
        self._escaped = False  # the last fragment ended in a backslash inside a string

    @property
    def arguments(self) -> str:
        return "".join(self._pieces)

    def is_over(self, call_id: str, name: str, arguments: str) -> bool:
        """Return whether a delta with the same index starts another call.

        Some servers give every call the index 0, or none. Then a new id or another name marks the start of a call; so
        do arguments that come with an id or a name after a complete object. With the same id they must be another
        object, because some servers repeat the whole call at the end.
        """
        if not (call_id or name):
            return False
        if (call_id and self.id and call_id != self.id) or (name and self.name and name != self.name):
            return True
        more = arguments.strip()
        if not (self.closed and more):
            return False
        return not (call_id and self.id) or (more.startswith("{") and more != self.arguments)

    def extend(self, fragment: str) -> None:
        if not self._pieces:
            fragment = fragment.lstrip()
        if self.closed or not fragment:
            return
        end = self._scan(fragment)
        self._pieces.append(fragment[:end])

    def _scan(self, fragment: str) -> int:
        """Return how much of the fragment belongs to the object."""
        if not self._pieces and not fragment.startswith("{"):
            self._in_string, self._depth = False, -1
        if self._depth < 0:  # not an object: only the end of the call closes it
            return len(fragment)
        start = 1 if self._escaped else 0
        self._escaped = False
        for mark in self._MARKS.finditer(fragment, start):
            sign = mark.group()
            if self._in_string:
                self._in_string = sign != '"'
                self._escaped = sign == "\\"
            elif sign == '"':
                self._in_string = True
            elif sign in "{[":
                self._depth += 1
            elif sign in "}]":
                self._depth -= 1
                if self._depth <= 0:
                    self.closed = True
                    return mark.end()
        return len(fragment)


def check_finish(finish: str, text: str, has_calls: bool, usage: Usage, faults: Faults) -> None:
    if finish in _CUT:
        count = f" after {usage.completion_tokens} tokens" if usage.completion_tokens else ""
        raise Truncated(
            f"{faults.where}: the answer was cut{count} (finish_reason {finish}); give a larger max_tokens, or none",
            text=text,
            usage=usage,
            in_call=has_calls,
        )
    if finish in ABORTED:
        raise faults.bad(f"the server aborted the answer (finish_reason {finish})", text=text)
    if finish in _FILTERED:
        message = f"{faults.where}: the provider's content filter stopped the answer (finish_reason {finish})"
        raise Rejected(message, text=text, usage=usage)
    if finish == "tool_calls" and not has_calls and not text:
        raise faults.bad("the finish_reason is tool_calls, but the answer has no tool call")


def read_tokens(reports: Iterable[JsonValue]) -> tuple[TokenChance, ...] | None:
    """Return the tokens in the ``logprobs`` of an answer or of its pieces; None if there are none."""
    tokens: list[TokenChance] = []
    for report in reports:
        content = report.get("content") if isinstance(report, dict) else None
        for item in content if isinstance(content, list) else ():
            text, logprob = _token(item)
            others = item.get("top_logprobs") if isinstance(item, dict) else None
            known = [_token(other) for other in others] if isinstance(others, list) else []
            tokens.append(TokenChance(text, logprob, tuple((said, of) for said, of in known if of is not None)))
    return tuple(tokens) or None


def _token(item: JsonValue) -> tuple[bytes, float | None]:
    """Return the bytes of a token, and its log-probability if that is a number."""
    if not isinstance(item, dict):
        return b"", None
    text = item.get("token")
    data = item.get("bytes")
    logprob = item.get("logprob")
    known = string_of(text).encode("utf-8", "surrogatepass")
    if isinstance(data, list) and all(type(each) is int and 0 <= each < 256 for each in data):
        known = bytes(cast("list[int]", data)) or known
    is_number = isinstance(logprob, int | float) and not isinstance(logprob, bool) and math.isfinite(logprob)
    is_told = is_number and cast(float, logprob) > NOT_TOLD
    return known, float(cast(float, logprob)) if is_told else None


def error_in(document: Mapping[str, JsonValue]) -> JsonValue:
    return document.get("error") or (dict(document) if document.get("object") == "error" else None)


def text_in(content: JsonValue, faults: Faults) -> str:
    """Return the text of a message's content."""
    if isinstance(content, str):
        return content
    if content is None:
        return ""
    if isinstance(content, list):
        return "".join(string_of(part.get("text")) if isinstance(part, dict) else string_of(part) for part in content)
    raise faults.bad("the answer's content is neither text nor a list of parts")


def _reasoning(message: JsonObject) -> str:
    told = message.get("reasoning_content") or message.get("reasoning")
    return told if isinstance(told, str) else ""


def _reason(value: JsonValue) -> str | None:
    if isinstance(value, dict):
        value = value.get("type")
    return value.lower() if isinstance(value, str) and value else None


def _call_items(message: JsonObject, faults: Faults) -> list[JsonValue]:
    calls = message.get("tool_calls")
    if not calls:
        legacy = message.get("function_call")
        return [{"function": legacy}] if legacy else []
    if not isinstance(calls, list):
        raise faults.bad("the answer's tool_calls are not a list")
    return calls


def _number(item: JsonValue) -> int | str | None:
    """Return the server's index of a call."""
    index = item.get("index") if isinstance(item, dict) else None
    return index if isinstance(index, int | str) else None


def _call_fields(item: JsonValue, faults: Faults) -> tuple[str, str, str]:
    """Return id, name and arguments, each as text and possibly empty."""
    function = item.get("function") if isinstance(item, dict) else None
    if not isinstance(item, dict) or not (function is None or isinstance(function, dict)):
        raise faults.bad("the answer has a malformed tool call")
    arguments = function.get("arguments") if function else None
    if arguments is None:
        arguments = ""
    elif not isinstance(arguments, str):
        arguments = orjson.dumps(arguments).decode()
    return string_of(item.get("id")), string_of(function.get("name")) if function else "", arguments


def _signature(item: JsonValue) -> JsonValue:
    return item.get(SIGNATURES) if isinstance(item, dict) else None


def read_usage(value: JsonValue) -> Usage:
    if not isinstance(value, dict):
        return Usage()
    prompt, completion = value.get("prompt_tokens"), value.get("completion_tokens")
    details = value.get("prompt_tokens_details")
    reasoned = value.get("completion_tokens_details")
    if isinstance(details, dict) and len(details) == 1 and not reasoned:  # what engines report
        cached = details.get("cached_tokens")
        if (
            type(prompt) is int
            and type(completion) is int
            and type(cached) is int
            and 0 <= cached <= prompt < LARGEST_COUNT
            and 0 <= completion < LARGEST_COUNT
        ):
            return Usage(prompt, cached, completion)
    if type(prompt) is not int or not 0 <= prompt < LARGEST_COUNT:
        prompt = counted(value, "prompt_tokens")
    if type(completion) is not int or not 0 <= completion < LARGEST_COUNT:
        completion = counted(value, "completion_tokens")
    cached = counted(details, "cached_tokens") or counted(value, "prompt_cache_hit_tokens")
    reasoning = counted(reasoned, "reasoning_tokens")
    return usage_of(prompt, cached, completion, reasoning, counted(details, *_CACHE_WRITES))


logger = logging.getLogger("batch_agent")

SCHEMA, LOGPROBS = "schema", "logprobs"  # the options that a server may refuse
_SEED = re.compile(r"\b(?:random_)?seed\b", re.IGNORECASE)
NOT_TOLD = -9999.0  # in place of a log-probability that a server does not know
ALTERNATIVES = 5  # tokens reported at each place of an answer; some servers refuse more
OTHER_WIRES = ("completions", "embeddings")  # that these servers have beside their conversations
STREAMS_USAGE = ("chat", "completions")  # wires whose streams have the usage only if it is asked for
LISTING_SECONDS = 5.0  # to list the models for an error message


Tail: TypeAlias = tuple[JsonObject, Mapping[str, str] | None]
"""Fields of one request beside its messages: body fields (a priority, hints) and headers (an id). They come after
the messages, so that the prefix stays the same."""

NO_TAIL: Tail = {}, None


class OpenAIServer(HttpBackend[bytes]):
    """One server at ``base_url`` (without the wire's path). ``tail`` returns the fields of one request, for servers
    that accept hints; ``query`` is appended to every path. With ``models`` the server is not asked for its list.

    A schema that the server refuses or ignores is detected from the first answers and remembered: later requests omit
    it, and ``Capabilities`` reports it. If the server does not have a model, the error lists the models it has.
    """

    path: str  # of the wire
    view: type[JsonView]  # of the wire
    logprobs = False  # the wire has log-probabilities

    def __init__(
        self,
        base_url: str,
        *,
        api_key: str | None = None,
        headers: Mapping[str, str] | None = None,
        capabilities: Capabilities | None = None,
        name: str | None = None,
        dialect: Dialect = STANDARD,
        tail: Callable[[ModelRequest], Tail] | None = None,
        query: str = "",
        models: Sequence[str] = (),
        transport: Transport | None = None,
    ) -> None:
        http = HttpClient(base_url, api_key=api_key, headers=headers, transport=transport)
        route = http.route("POST", self.path + query)
        able = replace(capabilities or Capabilities(images=True), logprobs=self.logprobs)
        super().__init__(http, route, capabilities=able, name=name)
        self._models = http.route("GET", f"/models{query}")
        self._query = query
        self._given = list(models)
        self._served: list[str] | None = None  # None: not requested yet
        self._listing = asyncio.Lock()
        self._dialect = dialect
        self._tail = tail
        self._keeps_schemas = False  # an answer has shown it
        self._has_logprobs = False  # an answer has shown it
        self._takes_seeds: bool | None = None  # of samples; None: not known yet

    # Facts about shapes, created on first use, because a fleet may have a thousand of these.

    @lazy_property
    def _wraps(self) -> WeakKeyDictionary[RequestShape, bool]:
        return WeakKeyDictionary()

    @lazy_property
    def _keys(self) -> WeakKeyDictionary[RequestShape, tuple[str, str]]:
        return WeakKeyDictionary()

    async def __aenter__(self) -> Self:
        await super().__aenter__()
        self._listing = asyncio.Lock()  # of this event loop
        return self

    def check(self, shape: RequestShape) -> None:
        if self._dialect.openai_models:
            check_options(shape)
        if shape.seed is not None and self._dialect.seed_field is None:
            raise SpecError(f"{self.name} takes no seed: leave it out")
        super().check(shape)

    def learn(self, request: ModelRequest, reply: Reply, refused: Mapping[str, Rejected]) -> None:
        schema, proven = request.shape.schema, self._capabilities.schema_proven
        if request.seed is not None and self._takes_seeds is None:
            self._takes_seeds = True
        if request.shape.logprobs and not self._has_logprobs and not reply.tool_calls:
            self._has_logprobs = reply.tokens is not None
            if reply.tokens is None:
                self._give_logprobs_up("reported none, although they were requested")
        if refused and (refusal := refused.get(LOGPROBS)) is not None and SCHEMA not in refused:
            self._give_logprobs_up(f"refused them ({refusal})")
        if refused and (refusal := refused.get(SCHEMA)) is not None:
            self._give_schemas_up(f"refused the output schema ({refusal})")
        elif not (schema is None or proven or reply.tool_calls) and self.own_body(request) is None:
            self._judge(reply.text, schema)

    async def without(self, request: ModelRequest, error: Rejected, refused: dict[str, Rejected]) -> ModelRequest:
        """Leave out the log-probabilities or the schema, if one is the reason for the refusal. A server without earlier
        answers may refuse either with any message."""
        if request.shape.logprobs and self.own_body(request) is None:
            named = "logprob" in str(error).lower()
            if named or (blamed(error) == "perhaps" and not self._has_logprobs):
                refused[LOGPROBS] = error
                if named:
                    self._give_logprobs_up(f"refused them ({error})")
                return replace(request, shape=self.without_logprobs(request.shape))
        unproven = request.seed is not None and self._takes_seeds is not True
        if unproven and _SEED.search(str(error)) and blamed(error) != "no":
            if self._takes_seeds is None:
                self._takes_seeds = False
                logger.warning(
                    "samples: %s takes no seed (%s): its samples differ by temperature alone", self.name, error
                )
            return replace(request, seed=None)
        refusal = await self._explained(error, request.shape.model)
        if request.shape.schema is None or self.own_body(request) is not None:
            raise refused.get(SCHEMA, refusal) from None
        blame = blamed(refusal)
        if blame == "no" or (blame == "perhaps" and (self._capabilities.schema_proven or self._keeps_schemas)):
            raise refusal from None
        if blame == "surely":
            self._give_schemas_up(f"refused the output schema ({refusal})")
        refused[SCHEMA] = refusal
        return replace(request, shape=self.without_schema(request.shape))

    def finished(self, reply: Reply, shape: RequestShape) -> Reply:
        if shape.schema is not None and self._wraps_answer(shape, shape.schema):
            reply = replace(reply, text=unwrapped(reply.text))
        if self._dialect.wants_reasoning and reply.reasoning:
            reply = replace(reply, sealed=sealed_with(reply.sealed, reply.reasoning))
        return reply

    async def models(self) -> list[str]:
        if self._given:
            return self._given
        body = await self._http.send(self._models) or b""
        names = read_models(body)
        if names is None:
            shown = self._models.faults.clean(body.decode("utf-8", "replace"))
            raise self._models.faults.bad(f"the answer is not a list of models: {shown}")
        return names

    # One request

    @property
    def wires(self) -> frozenset[str]:
        return frozenset({self.wire, *OTHER_WIRES})

    def own_route(self, wire: str) -> Route:
        return self._chat if wire == self.wire else self._http.route("POST", f"/{wire}{self._query}")

    def write_own(self, client: ClientBody, request: ModelRequest) -> tuple[JsonObject, Mapping[str, str] | None]:
        fields, headers = super().write_own(client, request)
        more, own = self.tail_of(request)
        fields["model"] = self._dialect.deployment or request.shape.model
        if request.relay is not None and client.wire in STREAMS_USAGE and self._dialect.stream_options:
            options = fields.get("stream_options")
            fields["stream_options"] = {**(options if isinstance(options, dict) else {}), "include_usage": True}
        return {**more, **fields}, {**(headers or {}), **(own or {})}

    def write_body(self, head: bytes, request: ModelRequest) -> tuple[bytes, Mapping[str, str] | None]:
        fields, headers = self.tail_of(request)
        return join_body(head, request.conversation.view(self.view), end_body(fields) if fields else b"]}"), headers

    def tail_of(self, request: ModelRequest) -> Tail:
        """Return the fields of this request; the user's extra_body overrides them."""
        if self._tail is None and not self._dialect.cache_key and request.seed is None:
            return NO_TAIL  # most servers
        fields, headers = tail = NO_TAIL if self._tail is None else self._tail(request)
        extra = request.shape.extra_body
        if not self._dialect.cache_key and request.seed is None and not (extra and fields):
            return tail
        if request.seed is not None and self._dialect.seed_field is not None and self._takes_seeds is not False:
            fields = {**fields, self._dialect.seed_field: request.seed}
        if self._dialect.cache_key:
            fields = {**fields, "prompt_cache_key": self._cache_key(request)}
        return {name: value for name, value in fields.items() if name not in extra}, headers

    def _cache_key(self, request: ModelRequest) -> str:
        """Return a key shared by all agents with the same prefix: the same model, tools and system prompt."""
        shape, shared = request.shape, _system(request.conversation.messages)
        known = self._keys.get(shape)
        if known is None or known[0] != shared:
            tools = [[tool.name, tool.description, tool.parameters] for tool in shape.tools]
            begins = orjson.dumps([shape.model, tools]) + shared.encode("utf-8", "replace")
            known = self._keys[shape] = shared, f"batch-agent-{blake2b(begins, digest_size=12).hexdigest()}"
        return known[1]

    # Detection of missing features

    def _judge(self, text: str, schema: JsonObject) -> None:
        if is_kept(text, schema):
            self._keeps_schemas = True
        else:
            self._give_schemas_up("accepted the output schema but did not enforce it")

    def _give_logprobs_up(self, why: str) -> None:
        if self._capabilities.logprobs:
            self._capabilities = replace(self._capabilities, logprobs=False)
            logger.warning(
                "doubt: %s reports no log-probabilities: it %s. It is not asked for them again", self.name, why
            )

    def _give_schemas_up(self, why: str) -> None:
        if not self._capabilities.schema_note:
            note = f"{self.name} {why}: answers are validated, and repaired if they do not fit"
            self._capabilities = replace(
                self._capabilities, native_schema=False, schema_with_tools=False, schema_note=note
            )

    def _wraps_answer(self, shape: RequestShape, schema: JsonObject) -> bool:
        if (wraps := self._wraps.get(shape)) is None:
            wraps = self._wraps[shape] = self._dialect.schema_form(schema).wrapped
        return wraps

    async def _explained(self, refusal: Rejected, model: str) -> Rejected:
        """Return the refusal, with the models that the server has if the model may be the reason."""
        if not may_be_unknown(refusal):
            return refusal
        async with self._listing:
            if self._served is None:
                self._served = []
                with suppress(BackendError, TimeoutError):
                    async with asyncio.timeout(LISTING_SECONDS):
                        self._served = await self.models()
        said = no_such_model(model, self._served, self.name)
        return refusal if said is None else Rejected(f"{said} ({refusal})", status=404)


class JsonView(ABC):
    """The messages as JSON: ``shared`` is what all agents share, encoded once; ``own`` are the values of the others."""

    __slots__ = ("own", "shared")

    def __init__(self, shared: bytes = b"") -> None:
        self.shared = shared
        self.own: list[JsonValue] = []

    @abstractmethod
    def extend(self, messages: Sequence[Message]) -> None: ...

    def fork(self) -> Self:
        if self.own:  # once: a conversation with forks is complete
            self.shared = join_body(b"", self, b"")
            self.own = []
        return type(self)(self.shared)


def join_body(head: bytes, view: JsonView, end: bytes = b"]}") -> bytes:
    own = written(view.own)[1:-1]
    return b"".join((head, view.shared, b"," if own and view.shared else b"", own, end))


def end_body(fields: JsonObject) -> bytes:
    """Return the end of a body: what closes the messages, with the fields of this request."""
    return b"]," + orjson.dumps(fields)[1:] if fields else b"]}"


def _system(messages: Sequence[Message]) -> str:
    return content_text(messages[0].content) if messages and messages[0].role == "system" else ""


def encode_head(shape: RequestShape, stream: bool, dialect: Dialect = STANDARD) -> bytes:
    """Return the body up to the bracket that opens the messages, included. ``extra_body`` overrides other fields."""
    fields: dict[str, object] = {
        "model": dialect.deployment or shape.model,
        dialect.max_tokens_field: shape.max_tokens,
        "temperature": shape.temperature,
        "top_p": shape.top_p,
        "stop": list(shape.stop) or None,
    }
    if dialect.seed_field is not None:
        fields[dialect.seed_field] = shape.seed
    if shape.tools:
        fields["tools"] = [
            {
                "type": "function",
                "function": {"name": tool.name, "description": tool.description, "parameters": tool.parameters},
            }
            for tool in shape.tools
        ]
        fields["tool_choice"] = _tool_choice(shape.tool_choice)
    if shape.schema is not None:
        form = dialect.schema_form(shape.schema)
        schema = {"name": shape.schema_name, "schema": form.schema, "strict": form.strict}
        fields["response_format"] = {"type": "json_schema", "json_schema": schema}
    if shape.logprobs:
        fields |= {"logprobs": True, "top_logprobs": ALTERNATIVES}
    if stream:
        fields["stream"] = True
        fields["stream_options"] = {"include_usage": True} if dialect.stream_options else None
    return written_options(shape, fields, ("messages", "stream"))[:-1] + b',"messages":['


def message_json(message: Message) -> JsonObject:
    content = message.content if isinstance(message.content, str) else content_json(message.content)
    fields: JsonObject = {"role": message.role, "content": content}
    sealed = NOTHING
    if message.sealed is not None:
        sealed = opened(message.sealed)
        fields |= sealed.fields
    if message.tool_calls:
        # Content stays "" beside calls: some chat templates fail on null.
        fields["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": echoed(call.arguments)},
                **sealed.of_call(call.id),
            }
            for call in message.tool_calls
        ]
    if message.tool_call_id:
        fields["tool_call_id"] = message.tool_call_id
    return fields


class ChatView(JsonView):
    """A tool result of this wire is text. Its images follow in a user message, after all results of the same answer."""

    __slots__ = ()

    def extend(self, messages: Sequence[Message]) -> None:
        shown: list[Part] = []
        for message in messages:
            if shown and message.role != "tool":
                self.own.append(message_json(Message("user", tuple(shown))))
                shown = []
            if isinstance(message.content, str):
                pass
            elif message.role == "tool" and (images := images_of(message.content)):
                shown += [f"Images from {message.tool_name or 'the tool'}:", *images]
                message = replace(message, content=content_text(message.content))
            self.own.append(message_json(message))
        if shown:
            self.own.append(message_json(Message("user", tuple(shown))))


def _tool_choice(choice: JsonValue) -> JsonValue:
    if isinstance(choice, str) and choice not in ("auto", "none", "required"):
        return {"type": "function", "function": {"name": choice}}
    return choice


class OpenAIBackend(OpenAIServer):
    path = "/chat/completions"
    wire = "chat"
    read_whole = staticmethod(read_answer)
    view = ChatView
    logprobs = True
    read_stream = AnswerStream

    def write_head(self, shape: RequestShape, streamed: bool) -> bytes:
        return encode_head(shape, streamed, self._dialect)
