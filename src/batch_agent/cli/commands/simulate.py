"""``batch-agent simulate``: serves the simulated engine over an OpenAI-compatible API.

Its flags are made from the fields of EngineModel.
"""

from __future__ import annotations

import argparse
import dataclasses
import types
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from batch_agent.backends.simulated import EngineModel
from batch_agent.cli.interrupts import serve
from batch_agent.cli.output.streams import say
from batch_agent.cli.spec.numbers import add_address
from batch_agent.testing import serve_simulated

NO_LIMIT = "none"


def add_simulate_arguments(parser: argparse.ArgumentParser) -> None:
    add_address(parser, 8000)
    engine = parser.add_argument_group("the engine", "durations in seconds, lengths in tokens")
    types_by_name = get_type_hints(EngineModel, include_extras=True)
    for field in dataclasses.fields(EngineModel):
        flag = "--" + field.name.replace("_", "-")
        kind, doc = get_args(types_by_name[field.name])
        text = f"{doc.documentation} (default %(default)s)"
        engine.add_argument(flag, dest=field.name, default=field.default, **_reading(kind), help=text)


def _reading(kind: object) -> dict[str, Any]:
    """Return the arguments of ``add_argument`` for a value of this type."""
    if kind is bool:
        return {"action": argparse.BooleanOptionalAction}
    if get_origin(kind) is Literal:
        return {"choices": get_args(kind)}
    if get_origin(kind) in (Union, types.UnionType):
        return {"type": lambda text: None if text.lower() == NO_LIMIT else int(text), "metavar": f"INT|{NO_LIMIT}"}
    assert isinstance(kind, type)
    return {"type": kind, "metavar": kind.__name__.upper()}


def simulate_command(options: argparse.Namespace) -> int:
    engine = EngineModel(**{field.name: getattr(options, field.name) for field in dataclasses.fields(EngineModel)})
    serving = serve_simulated(
        host=options.host,
        port=options.port,
        engine=engine,
        ready=lambda url: say(f"simulated engine at {url}; Ctrl-C stops it"),
    )
    return serve(serving)
