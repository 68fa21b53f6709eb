"""Observations, ids and actions that cannot be written as they are: each costs its own agent at most."""

from __future__ import annotations

import json
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.ticks.worlds import call, move, registered, says, sources

from batch_agent.testing import ScriptedBackend, virtual_clock
from batch_agent.ticks import Action, Agent, AgentRuntime
from batch_agent.ticks.plain import CHARACTERS, CUT, ITEMS, json_of, plain, text_of


class Raises:
    def __init__(self, error: type[BaseException] = ValueError) -> None:
        self._error = error

    def __str__(self) -> str:
        raise self._error("no text")

    __repr__ = __str__


class Closed:
    """Neither its attributes nor its class can be read."""

    def __getattribute__(self, name: str) -> object:
        raise ValueError(f"no {name}")


@dataclass
class Seen:
    at: tuple[int, int]
    what: object


class Number(int):
    """As numpy's are: a number that is written in another way."""

    def __repr__(self) -> str:
        return "Number(...)"


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


def cyclic() -> dict[str, Any]:
    value: dict[str, Any] = {}
    value["self"] = [value, value]
    return value


ODD = {
    "deep": nested(100_000),
    "bytes": {"picture": b"\xff\xfe"},
    "cycle": cyclic(),
    "raises": Raises(),
    "exits": {"x": Raises(SystemExit)},
    "closed": Closed(),
    "closed inside": [Closed()],
    "nan": float("nan"),
    "surrogate": "a \ud800",
    "surrogate key": {"\ud800": 1},
    "huge": 10**10_000,
    "raising key": {Raises(): 1},
    "set": {"b", "a", 1},
    "dataclass": Seen((0, 1), Raises()),
}


@pytest.mark.parametrize("name", ODD)
@virtual_clock
async def test_an_odd_observation_costs_nobody_an_action_and_is_in_the_trace(name: str, tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    backend = ScriptedBackend(lambda request: says())
    async with registered(AgentRuntime(backend=backend, trace=trace, skip_unchanged=True), "odd", "good") as runtime:
        for tick in (1, 2):
            actions = await runtime.process_tick(tick, {"odd": ODD[name], "good": {"tick": tick}})
            assert actions["good"].source == "answer" and actions["odd"].source in ("answer", "last")
    lines = [json.loads(line) for line in trace.read_text().splitlines()]
    assert [line["agent"] for line in lines] == ["odd", "good", "odd", "good"]


def test_plain_values_are_what_json_can_hold() -> None:
    value = {"seen": Seen((0, 1), {"b", "a"}), (1, 2): Number(7), "raw": b"\xffok", "none": None}
    assert plain(value) == {
        "seen": {"at": [0, 1], "what": ["a", "b"]},
        "[1, 2]": 7,
        "raw": "�ok",
        "none": None,
    }
    assert plain(cyclic()) == {"self": ["<cycle>", "<cycle>"]}
    assert plain(Raises()) == "<Raises, unreadable: ValueError: no text>"
    assert json_of({"x": float("inf")}) == b'{"x":null}'


def test_values_are_cut_to_a_size() -> None:
    assert json_of(nested(100_000)).count(b"[") < 100 and CUT in text_of(nested(100_000))
    assert len(text_of("x" * 10_000_000)) <= CHARACTERS + len(CUT)
    many = plain(list(range(1_000_000)))
    assert isinstance(many, list) and len(many) <= ITEMS + 1 and many[-1] == CUT
    shared: Any = []
    for _ in range(30):
        shared = [shared, shared]  # two to the power of thirty, written out
    assert len(json_of(shared)) < 1_000_000


def test_text_is_as_python_writes_it_where_that_can_be() -> None:
    assert text_of({"food": ["north"], "x": 1.5}) == "{'food': ['north'], 'x': 1.5}"
    assert text_of("as it is") == "as it is"
    assert text_of(Path("a/b")) == "a/b"
    assert text_of(OrderedDict(a=Number(1))) == "{'a': 1}"


@virtual_clock
async def test_odd_ids_are_ids(tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    odd: Any = {"\ud800": {}, 7: {}, Raises(): {}, "good": {}}
    async with registered(
        AgentRuntime(backend=ScriptedBackend(lambda request: says()), trace=trace), "\ud800", "good"
    ) as runtime:
        actions = await runtime.process_tick(1, odd)
        assert [action.source for action in actions.values()] == ["answer", "fallback", "fallback", "answer"]
    async with registered(AgentRuntime(replay=trace), "\ud800", "good") as again:
        replayed = await again.process_tick(1, odd)
    assert [action.source for action in replayed.values()] == ["answer", "fallback", "fallback", "answer"]


@virtual_clock
async def test_odd_actions_of_the_users_code_are_its_own_agents_failure(tmp_path: Path) -> None:
    def deciding(value: object) -> type[Agent]:
        return type("Deciding", (Agent,), {"_parse_action": lambda self, text: value})

    class Special(Action):
        def __init__(self, to: str) -> None:
            super().__init__("go", {"to": to})

    given = {
        "none": Action("go", None),  # type: ignore[arg-type]
        "list": Action("go", [1]),  # type: ignore[arg-type]
        "name": Action(Raises()),  # type: ignore[arg-type]
        "dict": {"tool": "go"},
        "inside": Action("go", {"x": Raises()}),
        "subclass": Special("north"),
    }
    runtime = registered(AgentRuntime(backend=ScriptedBackend(lambda r: says()), trace=tmp_path / "trace"), "good")
    for name, value in given.items():
        runtime.register_agent(deciding(value)(name))
        runtime.register_agent(Agent(f"{name}-fallback", fallback=lambda seen, value=value: value, tools=["sing"]))
    async with runtime:
        for tick in (1, 2):
            actions = await runtime.process_tick(tick, dict.fromkeys(runtime.agents))
            found = {name: action.source for name, action in actions.items() if not name.endswith("-fallback")}
            assert found == {
                "good": "answer",
                "none": "answer",
                "list": "fallback",
                "name": "fallback",
                "dict": "fallback",
                "inside": "answer",
                "subclass": "answer",
            }
            assert actions["list-fallback"].tool_name == actions["dict-fallback"].tool_name == "idle"
            assert (actions["none-fallback"].tool_name, actions["none"].parameters) == ("go", {})
    assert "a dict, not an Action" in str(actions["dict"].reasoning)


@virtual_clock
async def test_a_trace_holds_what_an_agent_saw_even_if_the_world_has_changed_it_since(tmp_path: Path) -> None:
    seen = {"a": {"x": 1}}

    class World(Agent):
        def _build_context(self) -> str:
            seen["a"]["x"] = 2
            seen["b"] = {}
            del seen["a"]
            return super()._build_context()

    runtime = AgentRuntime(backend=ScriptedBackend(lambda request: says(call())), trace=tmp_path / "trace")
    runtime.register_agent(World("a", tools=[move]))
    async with runtime:
        assert sources(await runtime.process_tick(1, seen)) == {"a": ("answer", 1)}
    assert json.loads((tmp_path / "trace").read_text())["observation"] == {"x": 1}
