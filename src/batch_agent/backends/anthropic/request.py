"""Requests for Anthropic's ``/v1/messages``: a conversation in that wire's format, the head of a body, and cache marks.

The system prompt is a separate field. All user and tool messages until the next answer form one message. Every tool
call is answered first thing in the message after it. An answer with parts that only this wire can read is sent back
unchanged. A mark (``cache_control``) says up to where the server should cache, or look up, the prefix. Marks are not
part of the cached text, so the rest of a body only grows.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import orjson
from pydantic import JsonValue

from batch_agent.backends.base import RequestShape, text_only
from batch_agent.backends.http.wire import echoed_object, objects_of, written, written_options
from batch_agent.backends.schema.visitor import Inexpressible, SchemaVisitor, listed, named, nodes, without
from batch_agent.compiler.system import schema_instruction
from batch_agent.compiler.tokens import BYTES_PER_TOKEN
from batch_agent.errors import SpecError
from batch_agent.messages import Attachment, Content, Document, JsonObject, Message, ToolCall, ToolSpec

# The API answers 400 to more than these.
MOST_OPTIONAL = 24
MOST_UNIONS = 16

_FORMATS = frozenset(
    ["date-time", "time", "date", "duration", "email", "hostname", "uri", "ipv4", "ipv6", "uuid"],
)
_TYPES = frozenset(["object", "array", "string", "integer", "number", "boolean", "null"])
# Keywords that bound a size or a value.
_BOUND = re.compile(r"(min|max|exclusive|unique|multiple)[A-Z]\w*|minimum|maximum|pattern|format")
# Keywords that do not constrain an answer.
_NEEDLESS = frozenset(
    ["default", "examples", "deprecated", "readOnly", "writeOnly", "discriminator", "$schema", "$id", "$comment"]
)
_REFERENCE = "#/$defs/"


def format_schema(schema: JsonObject) -> JsonObject | None:
    """Return the schema in the form the API accepts; None if that is impossible.

    The API compiles schemas to a grammar and refuses what it cannot compile: open objects, recursion, bounds of
    numbers, strings or lists, and too many optional or alternative parts. Bounds move into the description of their
    part, because every answer is checked against the full schema anyway. A map, a part of any type, and a root that is
    not an object have no grammar.
    """
    try:
        form = _Form(schema).root()
    except Inexpressible:
        return None
    parts = list(nodes(form))
    optional = sum(len(named(part, "properties")) - len(listed(part, "required")) for part in parts)
    unions = sum("anyOf" in part or isinstance(part.get("type"), list) for part in parts)
    return form if optional <= MOST_OPTIONAL and unions <= MOST_UNIONS else None


class _Form(SchemaVisitor[frozenset[str], JsonObject]):
    """Rewrites one schema. ``where`` holds the references above a node: the API allows no recursion."""

    def __init__(self, document: JsonObject) -> None:
        super().__init__(document)
        self._definitions: dict[str, JsonObject] = {}  # definitions already written

    def root(self) -> JsonObject:
        definitions: JsonObject = {
            name: self._definition(_REFERENCE + name, frozenset()) for name in named(self.document, "$defs")
        }
        root = self.visit(without(self.document, "$defs"), frozenset())
        self._check_root(root)
        return {**root, "$defs": definitions} if definitions else root

    def _definition(self, pointer: str, above: frozenset[str]) -> JsonObject:
        if pointer not in self._definitions:
            known, name = named(self.document, "$defs"), pointer.removeprefix(_REFERENCE)
            if pointer in above or name == pointer or name not in known:
                raise Inexpressible
            self._definitions[pointer] = self.visit(known[name], above | {pointer})
        return self._definitions[pointer]

    def reference(self, node: JsonObject, pointer: str, where: frozenset[str]) -> JsonObject:
        target = self._definition(pointer, where)
        # A reference must stand alone, so a description beside it goes to a copy of its target.
        return {**target, "description": node["description"]} if "description" in node else {"$ref": pointer}

    def typed(self, node: JsonObject, where: frozenset[str]) -> JsonObject:
        out: JsonObject = {}
        bounds: JsonObject = {}
        for name, part in node.items():
            if _is_kept(name, part):
                out[name] = part
            elif name in ("anyOf", "oneOf"):
                out["anyOf"] = [self.visit(option, where) for option in listed(node, name)]
            elif name == "properties":
                out[name] = {key: self.visit(inner, where) for key, inner in named(node, name).items()}
            elif name == "items":
                out[name] = self.visit(part, where)
            elif _BOUND.fullmatch(name):
                bounds[name] = part
            elif name not in _NEEDLESS and name != "additionalProperties":
                raise Inexpressible
        return _complete(out, bounds)

    def _check_root(self, root: JsonObject) -> None:
        while "$ref" in root:
            root = self._definitions[str(root["$ref"])]
        for option in listed(root, "anyOf"):
            self._check_root(option if isinstance(option, dict) else {})
        if "anyOf" not in root and root.get("type") != "object":
            raise Inexpressible


def _is_kept(name: str, part: JsonValue) -> bool:
    match name:
        case "title" | "description" | "const" | "required":
            return True
        case "type":
            return all(kind in _TYPES for kind in (part if isinstance(part, list) else [part]))
        case "enum":
            options = part if isinstance(part, list) else []
            return bool(part) and not any(isinstance(option, dict | list) for option in options)
        case "format":
            return part in _FORMATS
        case "minItems":
            return part in (0, 1)
        case _:
            return False


def _complete(node: JsonObject, bounds: JsonObject) -> JsonObject:
    if not node.keys() & {"type", "enum", "const", "anyOf"}:
        raise Inexpressible
    kinds = node.get("type")
    kinds = kinds if isinstance(kinds, list) else [kinds]
    if "object" in kinds:
        if "properties" not in node:
            raise Inexpressible  # a map: closed, it would be empty
        node["additionalProperties"] = False
    if "array" in kinds and "items" not in node:
        raise Inexpressible
    if bounds:
        told = ", ".join(f"{name}: {orjson.dumps(bound).decode()}" for name, bound in bounds.items())
        node["description"] = f"{node.get('description', '')} ({told})".strip()
    return node


WIRE = "anthropic"
MARK = b',"cache_control":{"type":"ephemeral"}}'
NO_RESULT = "This call has no result."
NO_WORDS: JsonObject = {"type": "text", "text": "(no text)"}  # the API requires a user message with text
_UNFIT = re.compile(r"[^a-zA-Z0-9_-]")


class MessagesView:
    """The blocks of the messages; those of the system prompt are encoded once. The last question and its answer are
    kept apart from what is ``closed``, because they may still get a mark. The user's message is ``open`` until the
    model has answered. A wire with the same turns and other blocks overrides how a block is written and marked."""

    __slots__ = ("_answer", "_asked", "_closed", "_open", "_owed", "_results", "size", "system")

    def __init__(self) -> None:
        self.system: list[bytes] = []
        self.size = 0  # bytes of everything except the system prompt
        self._closed: list[JsonObject] = []  # complete messages
        self._asked: list[JsonObject] = []
        self._answer: list[JsonObject] = []
        self._open: list[JsonObject] = []
        self._results = 0  # number of tool results in the open message; they come first
        self._owed: tuple[str, ...] = ()  # calls without a result

    @staticmethod
    def written(block: JsonObject) -> JsonObject:
        return block

    @staticmethod
    def marked(blocks: Sequence[bytes]) -> list[bytes]:
        """Return encoded blocks, the last one with a mark."""
        return [*blocks[:-1], blocks[-1][:-1] + MARK] if blocks else []

    def called_tools(self) -> Sequence[bytes]:
        """Return the definitions of tools that a request without tools must have, because its conversation has calls of
        them."""
        return ()

    def fork(self) -> Self:
        other = type(self)()
        other.system = self.system.copy()
        other._closed = self._closed.copy()
        other._asked = self._asked.copy()
        other._answer = self._answer.copy()
        other._open = self._open.copy()
        other.size = self.size
        other._results = self._results
        other._owed = self._owed
        return other

    def extend(self, messages: Sequence[Message]) -> None:
        for message in messages:
            blocks = [self.written(block) for block in _blocks(message)]
            encoded = list(map(written, blocks))
            if message.role == "system" and not (self._open or self._answer):
                self.system += encoded
                continue
            self.size += sum(map(len, encoded))
            if message.role == "assistant":
                self._take_answer(message, blocks)
            elif message.role == "tool":
                self._open[self._results : self._results] = blocks
                self._results += 1
                self._owed = tuple(call for call in self._owed if call != fit(message.tool_call_id))
            else:
                self._open += blocks

    def messages(self, *, marks_last: bool, marks_end: bool) -> bytes:
        """Return all messages, with a mark at the end and one at the end of the previous request."""
        parts = [written(self._closed)[1:-1]] if self._closed else []
        last = ("user", self._asked, marks_last), ("assistant", self._answer, False)
        for role, blocks, marks in (*last, ("user", self._said_now(), marks_end)):
            if blocks:
                encoded = list(map(written, blocks))
                parts.append(_message(role, self.marked(encoded) if marks else encoded))
        return b",".join(parts)

    def _take_answer(self, message: Message, blocks: list[JsonObject]) -> None:
        if not blocks:
            return  # an empty answer is no message: the user's message continues
        if not self._open and self._answer:
            self._answer += blocks
        else:
            exchange = (("user", self._asked), ("assistant", self._answer))
            self._closed += [{"role": role, "content": [*parts]} for role, parts in exchange if parts]
            self._asked = self._said_now() or [self.written(NO_WORDS)]
            self._answer = blocks
            self._open = []
            self._results = 0
        self._owed = tuple(fit(call.id) for call in message.tool_calls)

    def _said_now(self) -> list[JsonObject]:
        """Return the user's message so far. A tool call without a result gets the placeholder that servers require."""
        missing = [_result(call, NO_RESULT) | {"is_error": True} for call in self._owed]
        return [*self._open[: self._results], *map(self.written, missing), *self._open[self._results :]]


@dataclass(frozen=True, slots=True)
class Head:
    """What all requests of one shape start with."""

    fields: bytes  # without the closing brace
    tools: Sequence[bytes]
    told: Sequence[bytes]  # added to the system prompt: the schema, if the API cannot enforce it
    cached_from: int  # bytes
    goes_on: bool  # the agent may use tools: its next turn repeats this one as a prefix
    marks_tools: bool = True  # tools can be cached without a system prompt
    tools_field: tuple[bytes, bytes] = (b',"tools":[', b"]")  # what is before and after the tools

    def body(self, view: MessagesView, *, is_last: bool) -> bytes:
        """Return the body with at most three marks: after the prefix that all agents share; after the last question, if
        the previous turn cached something; and at the end, unless this is the last turn."""
        tools = self.tools or view.called_tools()
        system = [*view.system, *self.told]
        shared = sum(map(len, tools)) + sum(map(len, system))
        if shared >= self.cached_from and system:
            system = view.marked(system)
        elif shared >= self.cached_from and self.marks_tools:
            tools = view.marked(tools)
        marks = self.goes_on and shared + view.size >= self.cached_from
        parts = [self.fields]
        if tools:
            before, after = self.tools_field
            parts += [before, b",".join(tools), after]
        if system:
            parts += [b',"system":[', b",".join(system), b"]"]
        messages = view.messages(marks_last=marks, marks_end=marks and not is_last)
        return b"".join([*parts, b',"messages":[', messages, b"]}"])


def build_head(shape: RequestShape, streamed: bool) -> Head:
    extra = dict(shape.extra_body)
    # The server's own tools (web search) come after ours, other output settings beside the schema.
    server_tools, config = extra.pop("tools", []), extra.pop("output_config", {})
    if not isinstance(server_tools, list) or not isinstance(config, dict):
        raise SpecError("extra_body: tools must be a list, and output_config a mapping")
    form = None if shape.schema is None else format_schema(shape.schema)
    if form is not None:
        config = {"format": {"type": "json_schema", "schema": form}, **config}
    fields = {
        "model": shape.model,
        "max_tokens": answer_limit(shape),
        "temperature": shape.temperature,
        "top_p": shape.top_p,
        "stop_sequences": [*shape.stop] or None,
        "output_config": config or None,
        "tool_choice": _tool_choice(shape.tool_choice) if shape.tools else None,
        "stream": True if streamed else None,
    }
    start = written_options(replace(shape, extra_body=extra), fields, ("messages", "stream", "system"))
    try:
        told = [] if shape.schema is None or form is not None else [told_schema(shape.schema)]
        return Head(
            fields=start[:-1],
            tools=[orjson.dumps(tool) for tool in [*map(_tool, shape.tools), *server_tools]],
            told=[orjson.dumps(block) for block in told],
            cached_from=model_of(shape.model).cached_from * BYTES_PER_TOKEN,
            goes_on=bool(shape.tools or server_tools) and shape.tool_choice != "none",
        )
    except orjson.JSONEncodeError as error:
        raise SpecError(f"the options of the request cannot be written as JSON: {error}") from None


def answer_limit(shape: RequestShape) -> int:
    """Return the largest number of tokens of an answer, which the API requires."""
    return shape.max_tokens or model_of(shape.model).max_tokens + thinking_tokens(shape)


def thinking_tokens(shape: RequestShape) -> int:
    """Return the user's limit of thinking, in tokens, which is part of the answer; 0 if the model decides."""
    thinking = shape.extra_body.get("thinking")
    limit = thinking.get("budget_tokens") if isinstance(thinking, dict) else None
    return limit if isinstance(limit, int) else 0


def answer_blocks(message: Message) -> list[JsonObject]:
    """Return the blocks of an answer, as they are sent back."""
    if message.sealed is not None and message.sealed.wire == WIRE and isinstance(message.sealed.value, list):
        return objects_of(message.sealed.value)
    return [*_parts(message.content), *map(_call, message.tool_calls)]


def is_empty(block: JsonObject) -> bool:
    """Return whether a text block is empty: the API refuses it, even one that it sent itself."""
    text = block.get("text", "")
    return block.get("type") == "text" and isinstance(text, str) and not text.strip()


def _blocks(message: Message) -> list[JsonObject]:
    match message.role:
        case "system":
            return _parts(text_only(message))
        case "user":
            return _parts(message.content) or [NO_WORDS]
        case "assistant":
            return answer_blocks(message)
        case "tool":
            return [_result(fit(message.tool_call_id), message.content)]


def _parts(content: Content) -> list[JsonObject]:
    parts = (content,) if isinstance(content, str) else content
    blocks = [_attachment(part) if isinstance(part, Attachment) else _text(part) for part in parts]
    return [block for block in blocks if not is_empty(block)]


def _text(text: str) -> JsonObject:
    return {"type": "text", "text": text}


def _attachment(part: Attachment) -> JsonObject:
    kind, is_data, data = part.url.removeprefix("data:").partition(";base64,")
    source: JsonObject = {"type": "base64", "media_type": kind, "data": data}
    block: JsonObject = {"type": part.kind, "source": source if is_data else {"type": "url", "url": part.url}}
    return {**block, "title": part.name} if isinstance(part, Document) and part.name else block


def _call(call: ToolCall) -> JsonObject:
    return {"type": "tool_use", "id": fit(call.id), "name": call.name, "input": echoed_object(call.arguments)}


def _result(call_id: str, content: Content) -> JsonObject:
    block: JsonObject = {"type": "tool_result", "tool_use_id": call_id}
    parts = _parts(content)
    if parts:
        block["content"] = content if isinstance(content, str) else [*parts]
    return block


def fit(call_id: str) -> str:
    """Return the id of a call with only the characters that this API allows. Another wire may have created the id."""
    return _UNFIT.sub("_", call_id)


def _tool(tool: ToolSpec) -> JsonObject:
    described: JsonObject = {"description": tool.description} if tool.description.strip() else {}
    return {"name": tool.name, **described, "input_schema": {"type": "object", **tool.parameters}}


def _tool_choice(choice: JsonValue) -> JsonValue:
    if not isinstance(choice, str):
        return choice
    kinds = {"auto": "auto", "none": "none", "required": "any"}
    return {"type": kinds[choice]} if choice in kinds else {"type": "tool", "name": choice}


def told_schema(schema: JsonObject) -> JsonObject:
    return _text(schema_instruction(orjson.dumps(schema).decode()))


def _message(role: str, blocks: Sequence[bytes]) -> bytes:
    return b'{"role":"%b","content":[%b]}' % (role.encode(), b",".join(blocks))


@dataclass(frozen=True, slots=True)
class ModelRules:
    max_tokens: int  # default length of an answer: the API requires a number
    cached_from: int = 1024  # tokens; a shorter prefix is not cached, even if marked
    samples: bool = True  # accepts temperature and top_p
    samples_once: bool = True  # ... but not both together
    foreign: bool = False  # not by Anthropic: another server with the same wire and its own rules


# The first match counts. The default answer length is 16,000 tokens, which arrive without streaming in reasonable time,
# or the maximum of an older model. Models that think by default count thinking as part of the answer and get double.
_KNOWN = [
    (re.compile(pattern), model)
    for pattern, model in (
        (r"claude-3-5-haiku", ModelRules(8_192, 2048, samples_once=False)),
        (r"claude-3-haiku", ModelRules(4_096, 2048, samples_once=False)),
        (r"claude-3-5", ModelRules(8_192, samples_once=False)),
        (r"claude-3-7", ModelRules(16_000, samples_once=False)),
        (r"claude-3-", ModelRules(4_096, samples_once=False)),
        (r"claude-(haiku-4-5|opus-4-[56])", ModelRules(16_000, 4096)),
        (r"claude-opus-4-7", ModelRules(16_000, 4096, samples=False)),
        (r"claude-opus-4-8", ModelRules(16_000, samples=False)),
        (r"claude-\w+-4", ModelRules(16_000)),
        (r"claude-(opus|sonnet|haiku|fable|mythos)-", ModelRules(32_000, samples=False)),
    )
]
_NEW = ModelRules(16_000)  # an Anthropic model newer than this table
_FOREIGN = ModelRules(4_096, samples_once=False, foreign=True)


def model_of(name: str) -> ModelRules:
    known = (model for pattern, model in _KNOWN if pattern.search(name))
    return next(known, _NEW if "claude" in name else _FOREIGN)
