"""How the servers of OpenAI's wires differ, as data. ``servers`` and ``providers`` say which server uses which."""

from __future__ import annotations

from dataclasses import dataclass

from batch_agent.backends.openai.schema import SchemaForm, engine_form, strict_form
from batch_agent.messages import JsonObject


@dataclass(frozen=True, slots=True)
class Dialect:
    max_tokens_field: str = "max_tokens"
    seed_field: str | None = "seed"  # None: a seed is refused
    stream_options: bool = True  # accepts the field that requests usage at the end of a stream; else usage comes anyway
    strict_schemas: bool = False  # accepts a schema only in OpenAI's strict form
    cache_key: bool = False  # accepts a ``prompt_cache_key``, which routes requests with one prefix to the same cache
    wants_reasoning: bool = False  # refuses a conversation without the reasoning of earlier answers
    openai_models: bool = False  # serves OpenAI's models, whose names decide the accepted options (``models``)
    deployment: str = ""  # its fixed name for the model, whatever the user gives

    def schema_form(self, schema: JsonObject) -> SchemaForm:
        return strict_form(schema) if self.strict_schemas else engine_form(schema)


STANDARD = Dialect()
