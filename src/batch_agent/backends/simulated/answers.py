"""What the simulated model answers: determined by the request alone, so equal requests get equal answers.

The words have no meaning. A plan needs their number, the tool calls, and JSON that fits the schema.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

import orjson
from pydantic import JsonValue

from batch_agent.backends.base import RequestShape
from batch_agent.backends.http.wire import mapping
from batch_agent.backends.schema.visitor import Inexpressible, SchemaVisitor, listed, named, without
from batch_agent.backends.simulated.model import EngineModel
from batch_agent.backends.simulated.tokens import END, TOKEN_BYTES, count_tokens, encode, encode_call
from batch_agent.errors import SpecError
from batch_agent.messages import JsonObject, Message, ToolCall, ToolSpec

WORDS = ("sim", "ula", "ted", "ans", "wer", "tok", "ens", "and", "the", "rest", "with")


@dataclass(frozen=True, slots=True)
class SimulatedAnswer:
    """An answer. ``output`` is its tokens, with END. ``cut``: ``max_tokens`` ended it before END."""

    text: str
    calls: tuple[ToolCall, ...]
    output: bytes
    cut: bool

    @property
    def finish_reason(self) -> str:
        return "length" if self.cut else "tool_calls" if self.calls else "stop"

    def text_until(self, tokens: int) -> str:
        """Return the text of the first ``tokens`` tokens; a character in two tokens appears with the second."""
        return self.text.encode()[: tokens * TOKEN_BYTES].decode("utf-8", "ignore")

    def calls_until(self, tokens: int) -> int:
        """Return how many calls are complete after ``tokens`` tokens."""
        position, complete = count_tokens(encode(self.text)), 0
        for call in self.calls:
            position += count_tokens(encode_call(call))
            complete += position <= tokens
        return complete


def chat_answer(model: EngineModel, prompt: bytes, messages: Sequence[Message], shape: RequestShape) -> SimulatedAnswer:
    digest = hashlib.blake2b(b"%d" % model.seed + prompt, digest_size=8).hexdigest()
    tool = _chosen_tool(model, digest, messages, shape)
    if tool is not None:
        value = minimal_instance(tool.parameters or {"type": "object"}, filler=f"simulated-{digest[:4]}")
        call = ToolCall(f"call_{digest}", tool.name, orjson.dumps(value if isinstance(value, dict) else {}).decode())
        return _cut("", (call,), shape.max_tokens)
    if shape.schema is not None:
        text = orjson.dumps(minimal_instance(shape.schema, filler="simulated")).decode()
        return _cut(text, (), shape.max_tokens)
    return text_answer(model, prompt, max_tokens=shape.max_tokens)


def text_answer(model: EngineModel, prompt: bytes, *, max_tokens: int | None = None) -> SimulatedAnswer:
    """Return an answer of ``answer_tokens`` tokens, or fewer if ``max_tokens`` requires it."""
    length = min(model.answer_tokens, max_tokens or model.answer_tokens)
    start = hashlib.blake2b(b"%d" % model.seed + prompt, digest_size=32).digest()
    words = " ".join(WORDS[start[i % 32] % len(WORDS)] for i in range(length))
    size = (length - 1) * TOKEN_BYTES  # the last token is END
    return _cut(f"simulated {start.hex()[:8]} {words}"[: size - 1] + "." if size else "", (), max_tokens)


def _chosen_tool(model: EngineModel, digest: str, messages: Sequence[Message], shape: RequestShape) -> ToolSpec | None:
    tools, choice = shape.tools, shape.tool_choice
    if not tools or choice == "none":
        return None
    if isinstance(choice, dict):
        choice = mapping(choice.get("function")).get("name")
    for tool in tools:
        if tool.name == choice:
            return tool
    called = sum(1 for message in messages if message.tool_calls)
    if choice != "required" and called >= model.tool_calls_per_agent:
        return None
    return tools[int(digest, 16) % len(tools)]


def _cut(text: str, calls: tuple[ToolCall, ...], max_tokens: int | None) -> SimulatedAnswer:
    whole = encode(text) + b"".join(map(encode_call, calls)) + END
    if max_tokens is None or count_tokens(whole) <= max_tokens:
        return SimulatedAnswer(text, calls, whole, cut=False)
    answer = SimulatedAnswer(text, calls, whole[: max_tokens * TOKEN_BYTES], cut=True)
    return SimulatedAnswer(
        answer.text_until(max_tokens), calls[: answer.calls_until(max_tokens)], answer.output, cut=True
    )


FORMATS = {
    "date": "2000-01-01",
    "date-time": "2000-01-01T00:00:00Z",
    "time": "00:00:00Z",
    "duration": "PT0S",
    "email": "a@example.com",
    "uri": "http://example.com/",
    "uuid": "00000000-0000-4000-8000-000000000000",
    "ipv4": "192.0.2.1",
    "ipv6": "2001:db8::1",
    "hostname": "example.com",
}


class Endless(Exception):
    """Every value of this schema contains another value of it."""


def minimal_instance(schema: JsonObject, *, filler: str = "") -> JsonValue:
    """Return the smallest JSON value that fits a JSON schema. ``filler`` is put into unconstrained strings, so that two
    callers can differ.

    Supported: `$ref` into the schema itself, `const`, `enum`, `anyOf`, `oneOf`, `allOf`, types and lists of types,
    required properties, array and string lengths, number bounds and `multipleOf`, the common string formats. Not
    supported: `pattern`, `not`, conditionals, `uniqueItems` above one item; such a value may not validate.
    """
    try:
        return _Builder(schema, filler).visit(schema, ())
    except Endless:
        raise SpecError("this JSON schema has no finite value: it requires itself") from None
    except Inexpressible as error:
        raise SpecError(f"the JSON schema has an unresolved reference: {error}") from None


class _Builder(SchemaVisitor[tuple[str, ...], JsonValue]):
    """``where`` holds the references that led to a node."""

    def __init__(self, document: JsonObject, filler: str) -> None:
        super().__init__(document)
        self._filler = filler

    def anything(self, node: JsonValue, where: tuple[str, ...]) -> JsonValue:
        return None

    def choice(self, node: JsonObject, where: tuple[str, ...]) -> JsonValue:
        if "const" in node:
            return node["const"]
        options = listed(node, "enum")
        return options[0] if options else self.visit(without(node, "enum"), where)

    def reference(self, node: JsonObject, pointer: str, where: tuple[str, ...]) -> JsonValue:
        return self.visit(self._flat(node, where), (*where, pointer))

    def combined(self, word: str, node: JsonObject, where: tuple[str, ...]) -> JsonValue:
        rest, parts = without(node, word), listed(node, word)
        if word != "allOf" and parts:
            return self._smallest([_merge(rest, part) for part in parts], where)
        for part in parts:
            rest = _merge(rest, self._flat(part, where))
        return self.visit(rest, where)

    def typed(self, node: JsonObject, where: tuple[str, ...]) -> JsonValue:
        kind = node.get("type")
        if isinstance(kind, list):
            return self._smallest([{**node, "type": one} for one in kind], where)
        if kind == "object" or (kind is None and ("properties" in node or "required" in node)):
            return self._object(node, where)
        if kind == "array" or (kind is None and ("items" in node or "prefixItems" in node)):
            return self._array(node, where)
        if kind == "string":
            return self._string(node)
        if kind in ("integer", "number"):
            return _number(node, whole=kind == "integer")
        return False if kind == "boolean" else None

    def _smallest(self, options: list[JsonObject], refs: tuple[str, ...]) -> JsonValue:
        values: list[JsonValue] = []
        for option in options:
            try:
                values.append(self.visit(option, refs))
            except Endless:
                continue
        if not values:
            raise Endless
        return min(values, key=lambda value: len(orjson.dumps(value)))

    def _object(self, schema: JsonObject, refs: tuple[str, ...]) -> JsonValue:
        known = named(schema, "properties")
        names = [name for name in listed(schema, "required") if isinstance(name, str)]
        others = schema.get("additionalProperties", True)
        value: JsonObject = {name: self.visit(known.get(name, others), refs) for name in names}
        for name in [*known, *(f"key{i}" for i in range(_int(schema, "minProperties")))]:
            if len(value) >= _int(schema, "minProperties"):
                break
            value.setdefault(name, self.visit(known.get(name, others), refs))
        return value

    def _array(self, schema: JsonObject, refs: tuple[str, ...]) -> JsonValue:
        rest = schema.get("items", True)
        kinds = [*listed(schema, "prefixItems"), *([rest] * _int(schema, "minItems"))][: _int(schema, "minItems")]
        return [self.visit(kind, refs) for kind in kinds]

    def _string(self, schema: JsonObject) -> str:
        if isinstance(form := schema.get("format"), str) and form in FORMATS:
            return FORMATS[form]
        text = self._filler.ljust(_int(schema, "minLength"), "x")
        return text[: _int(schema, "maxLength")] if "maxLength" in schema else text

    def _flat(self, node: JsonValue, refs: tuple[str, ...]) -> JsonValue:
        """Return the target of a chain of references, with the keywords beside them."""
        while isinstance(node, dict) and "$ref" in node:
            pointer = str(node["$ref"])
            if pointer in refs:
                raise Endless
            target = self.resolve(pointer)
            if not isinstance(target, dict):
                raise Inexpressible(f"$ref {pointer} points to no schema")
            node, refs = {**target, **without(node, "$ref")}, (*refs, pointer)
        return node


def _merge(left: JsonObject, right: JsonValue) -> JsonObject:
    if not isinstance(right, dict):
        return left
    merged: JsonObject = {**left, **right}
    for keyword in ("properties", "$defs"):
        if both := named(left, keyword) | named(right, keyword):
            merged[keyword] = both
    if names := [*listed(left, "required"), *listed(right, "required")]:
        merged["required"] = list(dict.fromkeys(map(str, names)))
    return merged


def _int(schema: JsonObject, key: str) -> int:
    value = schema.get(key)
    return int(value) if isinstance(value, int | float) else 0


def _bound(schema: JsonObject, key: str) -> float | None:
    value = schema.get(key)
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def _number(schema: JsonObject, *, whole: bool) -> JsonValue:
    """Return the allowed number nearest to 0."""
    step = _bound(schema, "multipleOf") or (1 if whole else None)
    low, high = _bound(schema, "minimum"), _bound(schema, "maximum")
    above = _bound(schema, "exclusiveMinimum")
    below = _bound(schema, "exclusiveMaximum")
    floor = max((bound for bound in (low, above) if bound is not None), default=-math.inf)
    ceiling = min((bound for bound in (high, below) if bound is not None), default=math.inf)
    value = min(max(0.0, floor), ceiling)
    if step is not None:
        value = (math.ceil(value / step) if value > 0 else math.floor(value / step)) * step
        value += step * (value == above) - step * (value == below)
    elif value == above:
        value = (above + ceiling) / 2 if ceiling < math.inf else above + 1
    elif value == below:
        value = (below + floor) / 2 if floor > -math.inf else below - 1
    return int(value) if value == int(value) else value
