"""In what the servers that speak OpenAI's wires differ, as data. Who speaks which is in ``servers``, ``providers``."""

from __future__ import annotations

from dataclasses import dataclass

from batch_agent.backends.openai.schema import SchemaForm, engine_form, strict_form
from batch_agent.messages import JsonObject


@dataclass(frozen=True, slots=True)
class Dialect:
    max_tokens_field: str = "max_tokens"
    seed_field: str | None = "seed"  # None: it refuses one
    stream_options: bool = True  # takes the field that asks for usage at the end of a stream; else tells it anyway
    strict_schemas: bool = False  # takes a schema only in the form of OpenAI's strict mode
    cache_key: bool = False  # takes a ``prompt_cache_key``, by which requests with one prefix find the same cache
    wants_reasoning: bool = False  # refuses a conversation without the reasoning that it gave with its answers
    openai_models: bool = False  # its models are OpenAI's, and take what their names say (``openai_models``)
    deployment: str = ""  # what it calls the model, whatever the user does

    def schema_form(self, schema: JsonObject) -> SchemaForm:
        return strict_form(schema) if self.strict_schemas else engine_form(schema)


STANDARD = Dialect()
