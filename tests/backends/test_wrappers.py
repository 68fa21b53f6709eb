"""Wrappers forward everything: every wrapper, every method of ``Backend``, every kind of inner backend."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from tests.warm import start

from batch_agent.backends.base import Backend, Load, ModelRequest, OnToolCall, RequestShape
from batch_agent.backends.cache import CachingBackend
from batch_agent.backends.cache_store import ResponseStore
from batch_agent.backends.forwarding import ForwardingBackend
from batch_agent.backends.registry import open_backend
from batch_agent.cli.output.request_log import LoggedBackend
from batch_agent.errors import BackendError
from batch_agent.fleet.backend import Fleet
from batch_agent.messages import Conversation, Message, Reply
from batch_agent.scheduler.server_state import ServerState
from batch_agent.testing import BatchServer, Say, ScriptedBackend, ScriptedServer

SHAPE = RequestShape("m", temperature=0.0)
REQUEST = ModelRequest(SHAPE, Conversation([Message("user", "hello")]), "0")
METHODS = sorted(name for name in vars(Backend) if not name.startswith("_"))
BECOMES = {"is_fleet": {"servers"}, "generate_batch": {"infer", "infer_batch"}, "infer_batch": {"infer"}}


class Listening:
    def changed(self) -> None: ...


# An argument for each parameter of the methods of Backend, by its name.
ARGUMENTS: dict[str, object] = {
    "shape": SHAPE,
    "request": REQUEST,
    "requests": [REQUEST],
    "prompts": ["hello"],
    "model": "m",
    "endpoint": "",
    "listener": Listening(),
    "server": ServerState(),
    "record": None,
    "outlasts": False,
    "on_tool_call": None,
}


class Spy(ForwardingBackend):
    """Notes what was asked of it."""

    def __init__(self, inner: Backend) -> None:
        super().__init__(inner)
        self.asked: set[str] = set()

    def __getattribute__(self, name: str) -> object:
        if name not in ("asked", "inner"):
            self.asked.add(name)
        return super().__getattribute__(name)


def cached(inner: Backend, directory: Path) -> Backend:
    return CachingBackend(inner, ResponseStore(directory / "cache.db"))


def logged(inner: Backend, directory: Path) -> Backend:
    return LoggedBackend(inner, lambda exchange: None)


def forwarding(inner: Backend, directory: Path) -> Backend:
    return ForwardingBackend(inner)


class Bare(Backend):
    """Has what a backend must have, and the defaults."""

    name = "bare://"

    async def infer(self, request: ModelRequest, on_tool_call: OnToolCall | None = None) -> Reply:
        return Reply("ok")

    async def models(self) -> list[str]:
        return ["m"]


# Nobody is at these addresses: an error that says so is as good as an answer here.
INNER: dict[str, Callable[[], Backend]] = {
    "bare": Bare,
    "scripted": lambda: ScriptedBackend(lambda request: Say("ok")),
    "fleet": lambda: Fleet([ScriptedBackend(lambda request: Say("ok"))]),
    "engine": lambda: open_backend("vllm://127.0.0.1:9")[0],
    "batch API": lambda: open_backend("openai-batch://127.0.0.1:9/v1?tls=false&gather=0&look=0.001", api_key="k")[0],
}


@pytest.mark.parametrize("inner", INNER)
@pytest.mark.parametrize("wrapper", [forwarding, cached, logged])
async def test_every_method_reaches_the_inner_backend(
    wrapper: Callable[[Backend, Path], Backend], inner: str, tmp_path: Path
) -> None:
    for name in METHODS:
        spy = Spy(INNER[inner]())
        async with wrapper(spy, tmp_path / name) as wrapped:
            with suppress(BackendError):
                await _used(wrapped, name)
        assert {"__aenter__", "__aexit__"} < spy.asked
        assert ({name} | BECOMES.get(name, set())) & spy.asked, name


async def _used(backend: Backend, name: str) -> None:
    value = getattr(backend, name)
    if callable(value):
        value = value(**{parameter: ARGUMENTS[parameter] for parameter in inspect.signature(value).parameters})
    if inspect.isawaitable(value):
        await value


async def test_wrappers_around_each_other_keep_what_the_inner_backend_says_of_itself(tmp_path: Path) -> None:
    class Busy(ScriptedBackend):
        async def load(self, endpoint: str = "") -> Load:
            return Load(running=3)

    inner = Busy()
    outer = logged(cached(inner, tmp_path), tmp_path)
    assert (outer.name, outer.servers, outer.capabilities) == (inner.name, inner.servers, inner.capabilities)
    assert await outer.load() == Load(running=3)


async def test_lists_are_taken_apart_where_each_answer_is_seen_by_itself(tmp_path: Path) -> None:
    engine, _ = open_backend("vllm://127.0.0.1:9")
    assert engine.capabilities.batch
    assert [wrapper(engine, tmp_path).capabilities.batch for wrapper in (cached, logged)] == [False, False]


async def test_a_run_over_a_fleet_can_be_logged(tmp_path: Path) -> None:
    async with ScriptedServer(lambda request: Say("fine")) as one, ScriptedServer(lambda request: Say("fine")) as two:
        hosts = tmp_path / "hosts.txt"
        hosts.write_text(f"{one.address}\n{two.address}\n")
        await _verbose_run(tmp_path, f"fleet://{hosts}")


async def test_a_run_over_a_batch_api_can_be_logged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-test")
    async with BatchServer(lambda request: Say("fine")) as server:
        await _verbose_run(tmp_path, server.openai_url)


async def _verbose_run(directory: Path, backend: str) -> None:
    rows, output = directory / "rows.csv", directory / "out.jsonl"
    rows.write_text("text\none\ntwo\n")
    arguments = ["run", "--task", "Say {text}", str(rows), "--model", "m", "--backend", backend, "-v"]
    arguments += ["--run-dir", str(directory / "run"), "--output", str(output)]
    process = await start("-m", "batch_agent", *arguments, stderr=asyncio.subprocess.PIPE)
    told = (await process.communicate())[1].decode()
    assert process.returncode == 0, told
    assert len(output.read_text().splitlines()) == 2
    assert "> row 0, turn 1: user: Say one" in told and "< row 1, turn 1" in told
