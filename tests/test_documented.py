"""``help`` and ``inspect`` on the methods that take options."""

import inspect
import pydoc
import typing
from collections.abc import AsyncIterable, Awaitable, Callable, Iterable, Mapping, Sequence, Sized
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from pydantic import JsonValue

from batch_agent import AgentResult, BatchAgent, BatchSpec, Message
from batch_agent.backends.base import Backend
from batch_agent.documented import plain
from batch_agent.events import Sink
from batch_agent.options import Options
from batch_agent.run.control import Crew
from batch_agent.runtimes.base import CommandLineRuntime
from batch_agent.spec import OLD_NAMES
from batch_agent.tools.base import Tool

METHODS = ["run", "stream", "open", "run_sync", "plan"]
NAMES = {
    "AgentResult": AgentResult,
    "Any": Any,
    "AsyncIterable": AsyncIterable,
    "Awaitable": Awaitable,
    "Backend": Backend,
    "Crew": Crew,
    "CommandLineRuntime": CommandLineRuntime,
    "Callable": Callable,
    "Iterable": Iterable,
    "JsonValue": JsonValue,
    "Mapping": Mapping,
    "Message": Message,
    "Path": Path,
    "Sequence": Sequence,
    "Sink": Sink,
    "Sized": Sized,
    "Tool": Tool,
}


def test_the_signature_has_every_option_with_its_default() -> None:
    for method in METHODS:
        parameters = inspect.signature(getattr(BatchAgent, method)).parameters
        assert set(BatchSpec.model_fields) <= set(parameters)
        assert parameters["max_retries"].default == BatchSpec.model_fields["max_retries"].default
        assert parameters["inputs"].default is inspect.Parameter.empty
        assert repr(parameters["max_inflight"].default) == "..."  # None is no limit, and not what one gets
        assert parameters["timeout_per_turn"].annotation == "float | None"
        assert not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())


def test_the_help_says_of_every_option_its_type_its_default_and_its_sentence() -> None:
    for method in METHODS:
        page = " ".join(pydoc.plain(pydoc.render_doc(getattr(BatchAgent, method))).split())
        for name, field in BatchSpec.model_fields.items():
            assert f" {name}: " in page
            assert plain(str(field.description)) in page
        assert "timeout_per_turn: float | None (default 600.0)" in page
        assert "max_turns: int | None (default: 1, with tools 10)" in page
        assert "task: str (default: required without a worker)" in page
        assert all(f"{old} for {new}" in page for old, new in OLD_NAMES.items())


def test_progress_is_a_keyword_of_those_that_return_all_results() -> None:
    for name in METHODS:
        parameters = inspect.signature(getattr(BatchAgent, name)).parameters
        assert ("progress" in parameters) == ("view" in parameters) == (name in ("run", "run_sync"))


def test_the_methods_are_what_they_were() -> None:
    assert inspect.iscoroutinefunction(BatchAgent.run)
    assert inspect.ismethod(BatchAgent.run_sync)
    assert getattr(BatchAgent.run, "__self__", None) is BatchAgent
    assert "BatchAgent" in pydoc.plain(pydoc.render_doc(BatchAgent))


def bare(kind: Any) -> Any:
    """A type without its checks, and the members of a union as a set."""
    if get_origin(kind) is Annotated:
        return bare(get_args(kind)[0])
    if get_origin(kind) in (typing.Union, type(int | str)):
        return frozenset(map(bare, get_args(kind)))
    return (get_origin(kind), *map(bare, get_args(kind))) if get_args(kind) else kind


def is_free(kind: Any) -> bool:
    """Whether the spec takes anything there, for others to resolve."""
    return kind is Any or any(map(is_free, get_args(kind)))


def test_the_type_that_checkers_and_help_know_is_the_one_that_is_checked() -> None:
    typed, checked = get_type_hints(Options, localns=NAMES), get_type_hints(BatchSpec, include_extras=True)
    names = [name for name in BatchSpec.model_fields if not is_free(checked[name])]
    assert len(names) > 40
    assert [name for name in names if bare(typed[name]) != bare(checked[name])] == []
