"""The options of a pool, its calls and the patterns, checked before anything is sent. Pure.

``SwarmOptions`` are the names for users and type checkers. ``CallOptions`` combines the pool's options with the call's.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from numbers import Real
from operator import index as integer
from pathlib import Path
from typing import Any, Literal, TypedDict, TypeVar, cast

from pydantic import JsonValue

from batch_agent.backends.address import check_known
from batch_agent.backends.openai.schema import engine_form
from batch_agent.compiler.schema import OutputSchema
from batch_agent.errors import BackendError, JobError, OutputError, SpecError
from batch_agent.messages import JsonObject, Usage
from batch_agent.outputs.surrogates import mended
from batch_agent.outputs.validate import parse_output

Dispatch = Literal["round_robin", "balanced"]
T = TypeVar("T")

OWN_FIELDS = frozenset(("model", "messages", "prompt", "max_tokens", "stream"))


@dataclass
class Response:
    """``usage`` of a prompt in a list is its share of the list's usage, by length; the sum is exact. ``finish_reason``
    is ``length`` for a cut answer. ``latency`` is the seconds of the answered request, ``attempts`` the number of
    requests, ``parsed`` the text as a value of ``schema=``."""

    success: bool
    text: str
    error: str | None = None
    agent_index: int = -1
    usage: Usage | None = None
    finish_reason: str | None = None
    latency: float | None = None
    attempts: int = 0
    parsed: object = None

    def __post_init__(self) -> None:
        # Not dataclass fields: equal answers compare equal wherever they were in a list, and however they failed.
        self.index = -1  # of its prompt in the call
        self.fault: JobError | None = None  # the error behind ``error``, if there is no answer

    @classmethod
    def failed(cls, fault: JobError, agent_index: int = -1, attempts: int = 0) -> Response:
        response = cls(False, "", str(fault) or fault.type, agent_index, attempts=attempts)
        if isinstance(fault, BackendError):
            response.text, response.usage = fault.text, fault.usage
        response.fault = fault
        return response


class SwarmOptions(TypedDict, total=False):
    """The keyword options of a pool, its calls and the patterns; docs/swarm.md describes each."""

    dispatch: Dispatch
    chat: bool
    system: str | None
    temperature: float | None
    top_p: float | None
    stop: str | Sequence[str] | None
    seed: int | Sequence[int] | None
    n: int
    schema: object
    extra_body: Mapping[str, JsonValue]
    on_result: Callable[[Response], object] | None
    deadline: float | None
    run_dir: str | Path | None
    affinity: Sequence[str] | None
    hedge: float | None
    inflight: int | None


NAMES = tuple(SwarmOptions.__annotations__)


@dataclass(frozen=True, slots=True)
class CallOptions:
    max_tokens: int | None = None  # None: what the pool allows; the only one that users give by position
    chat: bool = False
    system: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    stop: str | Sequence[str] | None = None
    seed: int | Sequence[int] | None = None
    n: int = 1
    schema: OutputSchema[object] | None = None
    extra_body: Mapping[str, JsonValue] = field(default_factory=dict)
    dispatch: Dispatch = "round_robin"
    on_result: Callable[[Response], object] | None = None
    deadline: float | None = None
    run_dir: str | Path | None = None
    affinity: Sequence[str] | None = None
    hedge: float | None = None
    inflight: int | None = None

    def having(self, options: Mapping[str, object], max_tokens: int | None = None) -> CallOptions:
        """Return these options, overridden by those of a call. Raises SpecError for an invalid one."""
        if not options and max_tokens is None:
            return self
        check_known(options, NAMES, "a swarm has no option")
        changes = {**options, "max_tokens": max_tokens}
        if not isinstance(changes.get("schema"), OutputSchema | None):
            changes["schema"] = OutputSchema.of(changes["schema"])
        changed = replace(self, **changes)  # type: ignore[arg-type]
        changed._check()
        return changed

    def _check(self) -> None:
        if self.dispatch not in ("round_robin", "balanced"):
            raise SpecError(f"dispatch is {self.dispatch!r}: use round_robin or balanced")
        whole("n", self.n)
        for name in ("deadline", "hedge"):
            if getattr(self, name) is not None:
                above_zero(name, getattr(self, name))
        if self.inflight is not None:
            whole("inflight", self.inflight)
        for name in ("affinity", "hedge", "inflight"):
            if getattr(self, name) is not None and self.dispatch != "balanced":
                raise SpecError(f"{name} chooses where a prompt goes: it needs dispatch='balanced'")
        if self.on_result is not None and not callable(self.on_result):
            raise SpecError("on_result is not a function")
        if not isinstance(self.extra_body, Mapping):
            raise SpecError(f"extra_body is {self.extra_body!r}: give a mapping of fields to values")
        if taken := sorted(OWN_FIELDS & self.extra_body.keys()):
            raise SpecError(f"extra_body cannot set {taken[0]!r}: the engine sets this field itself")

    def check_lengths(self, prompts: int) -> None:
        """Raise SpecError if an option with a value per prompt does not have one for each prompt."""
        if isinstance(self.seed, Sequence) and len(self.seed) != prompts:
            raise SpecError(f"seed has {len(self.seed)} numbers for {prompts} prompts: give one, or one for each")
        if self.affinity is not None and (isinstance(self.affinity, str) or len(self.affinity) != prompts):
            raise SpecError(f"affinity must have a key for each of {prompts} prompts")

    @property
    def is_chat(self) -> bool:
        """Whether a list goes through the chat template. A system prompt requires it."""
        return self.chat or self.system is not None

    @property
    def is_balanced(self) -> bool:
        return self.dispatch == "balanced"

    @property
    def runs(self) -> bool:
        """Whether the call is a run of the engine, to balance its prompts or to record them."""
        return self.is_balanced or self.run_dir is not None

    def seed_of(self, index: int) -> int | None:
        return self.seed if isinstance(self.seed, int) or self.seed is None else self.seed[index]

    def alone(self, index: int) -> CallOptions:
        """Return the options of one prompt: with the seed of that prompt, and without the options of the whole call."""
        return self if self == PLAIN else replace(self, seed=self.seed_of(index), **OF_A_CALL)

    def sample(self, index: int, sample: int) -> CallOptions:
        """Return the options of one of the ``n`` answers to a prompt. Each has its own seed, if a seed is set."""
        own = replace(self.alone(index), n=1)
        return replace(own, seed=own.seed + sample) if isinstance(own.seed, int) and sample else own

    def row(self, prompt: str, index: int, sample: int) -> JsonObject:
        """Return the row of a run for one answer: everything that the answer depends on, apart from the options of the
        call."""
        row: JsonObject = {"prompt": mended(prompt)}
        if self.seed is not None:
            row["seed"] = self.seed_of(index)
        if self.affinity is not None:
            row["affinity"] = self.affinity[index]
        return row | {"sample": sample} if sample else row

    def as_keywords(self) -> SwarmOptions:
        """Return the options other than ``max_tokens``; {} if all have their defaults."""
        if replace(self, max_tokens=None) == PLAIN:
            return {}
        return cast(SwarmOptions, {name: getattr(self, name) for name in NAMES})

    def fields(self) -> JsonObject:
        """Return the fields of a request body that options set, without its prompt and its token limit."""
        assert self.seed is None or isinstance(self.seed, int)
        named: JsonObject = {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "stop": self.stop if self.stop is None or isinstance(self.stop, str) else list(self.stop),
            "seed": self.seed,
            "n": self.n if self.n > 1 else None,
        }
        if self.schema is not None:
            form = engine_form(self.schema.json_schema)
            wanted: JsonObject = {"name": self.schema.name, "schema": form.schema, "strict": form.strict}
            named["response_format"] = {"type": "json_schema", "json_schema": wanted}
        return {name: value for name, value in named.items() if value is not None} | dict(self.extra_body)

    def read(self, response: Response) -> Response:
        """Return the response with its parsed value, or as a failed one, if a schema was given."""
        if self.schema is None or not response.success:
            return response
        try:
            response.parsed = parse_output(response.text, self.schema).value
        except OutputError as error:
            cut = " (it was cut: raise max_tokens)" if response.finish_reason == "length" else ""
            response.success = False
            response.error = f"the answer does not fit the schema{cut}: {error}"
        return response


PLAIN = CallOptions()
OF_A_CALL: dict[str, Any] = {
    name: getattr(PLAIN, name)
    for name in ("dispatch", "on_result", "deadline", "run_dir", "affinity", "hedge", "inflight")
}


def whole(name: str, value: object, least: int | None = 1) -> int:
    """Return the value as an integer of at least ``least``; None: without a lower limit."""
    try:
        number = None if isinstance(value, bool) else integer(value)  # type: ignore[arg-type]
    except TypeError:
        number = None
    if number is None or (least is not None and number < least):
        more = "" if least is None else f", {least} or more"
        raise SpecError(f"{name} is {value!r}: give a whole number{more}")
    return number


def above_zero(name: str, value: object, what: str = "seconds") -> float:
    if isinstance(value, bool) or not isinstance(value, Real) or not float(value) > 0:
        raise SpecError(f"{name} is {value!r}: give {what} above 0")
    return float(value)


def setting(name: str, given: T | None, default: T, check: Callable[[str, object], T]) -> T:
    """Return the argument; if it is None, the number of its ``AURORA_SWARM_…`` variable; if that is not set, the
    default."""
    variable = f"AURORA_SWARM_{name.upper()}"
    text = (os.environ.get(variable) or "").strip()
    number: object = given
    try:
        if given is None and text:
            number = float(text)
    except ValueError:
        raise SpecError(f"{variable} is {text!r}: give it a number") from None
    if isinstance(number, float) and number.is_integer():
        number = int(number)
    if number == inf:
        raise SpecError(f"{name} is {number}: give a finite number")
    return default if number is None else check(name, number)


def texts_of(given: Iterable[str], what: str = "prompts") -> list[str]:
    """Return the texts of a list or a table's column. Raises SpecError for a single text or other items."""
    if isinstance(given, str):
        raise SpecError(f"{what} is one text: give a list of them")
    found = list(given)
    for place, text in enumerate(found):
        if not isinstance(text, str):
            raise SpecError(f"{what}[{place}] is of type {type(text).__name__}: give texts")
    return found
