"""The arguments of a tool that has a JSON schema instead of a signature."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Protocol, cast

from batch_agent.compiler.schema import no_retrieval
from batch_agent.errors import BadArguments, SpecError
from batch_agent.messages import JsonObject
from batch_agent.tools.schema import Arguments, Signature

PROBLEMS_SHOWN = 8


class _Problem(Protocol):
    message: str
    instance_path: list[str | int]


class _Validator(Protocol):
    def iter_errors(self, instance: object) -> list[_Problem]: ...


@dataclass(frozen=True, slots=True)
class SchemaSignature(Signature):
    """The arguments that a JSON schema allows. They are passed to the tool unchanged."""

    validator: _Validator | None = field(default=None, repr=False)

    @classmethod
    def of(cls, schema: JsonObject) -> SchemaSignature:
        """Return the signature of a JSON schema. Raises SpecError if it is not the schema of an object."""
        if schema.get("type", "object") != "object":
            raise SpecError(f"its arguments must be an object, but its schema has the type {schema.get('type')!r}")
        shown: JsonObject = {key: value for key, value in schema.items() if key != "$schema"}
        shown = {"type": "object", "properties": {}, **shown}
        import jsonschema_rs  # here, because few runs have such a tool

        try:
            validator = jsonschema_rs.validator_for({**schema}, retriever=no_retrieval)
        except ValueError as error:
            raise SpecError(f"its schema cannot be used: {str(error).splitlines()[0]}") from None
        return cls({}, True, False, shown, validator=cast("_Validator", validator))

    def parse(self, text: str) -> Arguments:
        raw = self._read(text)
        problems = []
        for error in self.validator.iter_errors(raw) if self.validator is not None else ():
            where = ".".join(map(str, error.instance_path))
            problems.append(f"{where}: {error.message}" if where else error.message)
            if len(problems) == PROBLEMS_SHOWN:
                break
        if problems:
            raise BadArguments(self._explain("the arguments do not fit", problems))
        return Arguments(raw, raw)

    def identity(self, arguments: Arguments) -> str:
        return json.dumps(arguments.raw, sort_keys=True)

    def _explain(self, what: str, problems: object = ()) -> str:
        lines = [f"- {problem}" for problem in cast("list[str]", problems)]
        return "\n".join([f"{what}:" if lines else what, *lines, f"Expected: {json.dumps(self.json_schema)[:2000]}"])
