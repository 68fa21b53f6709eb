"""The engine process seen from the parent, with a stand-in that speaks its wire: answers, deaths, replays, leaving."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from batch_agent.backends.base import ModelRequest, RequestShape
from batch_agent.backends.local.backend import EngineOptions, EngineProcess, LocalBackend
from batch_agent.errors import ContextOverflow, Rejected, SpecError, Truncated, Unavailable
from batch_agent.messages import Conversation, Message, ToolSpec, Usage

# Does what the last message says; writes what it hears to <path>.heard, and counts its lives there.
STAND_IN = """
import json, os, sys, time
heard = open(json.loads(sys.argv[2])["path"] + ".heard", "a", buffering=1)
heard.write(f"born {os.getpid()}\\n")
def say(**message):
    sys.stdout.write(json.dumps(message) + "\\n"); sys.stdout.flush()
if os.path.exists(json.loads(sys.argv[2])["path"] + ".broken"):
    say(fatal="cannot read it", suspects=[]); sys.exit(1)
say(ready=True)
for line in sys.stdin:
    message = json.loads(line)
    if "cancel" in message:
        heard.write(f"cancel {message['cancel']}\\n"); continue
    what = message["messages"][-1]["content"]
    heard.write(f"asked {message['id']} {what}\\n")
    verb, _, rest = what.partition(" ")
    lives = open(heard.name).read().count("born")
    if verb == "die" and lives <= int(rest):
        os.kill(os.getpid(), 9)
    elif verb == "poison":
        say(fatal="EBNF grammar error", suspects=[message["id"]]); sys.exit(1)
    elif verb == "refuse":
        say(id=message["id"], error=rest, message="no")
    elif verb != "hang":
        say(id=message["id"], first=True)
        finish, rest = ("length", rest) if verb == "cut" else ("stop", rest)
        say(id=message["id"], text=rest, finish=finish, prompt_tokens=9, cached_tokens=4, completion_tokens=2)
"""
PLAIN = RequestShape(model="m")


class StandIn:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.backend = LocalBackend(EngineOptions("m", path, threads=1), program=STAND_IN)

    def heard(self) -> list[str]:
        file = Path(f"{self.path}.heard")
        return file.read_text().splitlines() if file.exists() else []

    async def wait_heard(self, says: Callable[[list[str]], bool]) -> None:
        async with asyncio.timeout(20):
            while not says(self.heard()):
                await asyncio.sleep(0.01)


@asynccontextmanager
async def stand_in(tmp_path: Path) -> AsyncIterator[StandIn]:
    peer = StandIn(tmp_path / "m.gguf")
    async with peer.backend:
        yield peer


def ask(text: str, shape: RequestShape = PLAIN) -> ModelRequest:
    return ModelRequest(shape, Conversation([Message("user", text)]), "job")


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"


async def test_an_answer_has_its_usage_and_its_first_token(tmp_path: Path) -> None:
    async with stand_in(tmp_path) as peer:
        reply = await peer.backend.infer(ask("say hello"))
    assert reply.text == "hello"
    assert (reply.usage.prompt_tokens, reply.usage.cached_tokens, reply.usage.completion_tokens) == (9, 4, 2)
    assert reply.first_token is not None


async def test_a_death_in_the_middle_is_not_noticed_by_those_who_wait(tmp_path: Path) -> None:
    async with stand_in(tmp_path) as peer, asyncio.timeout(20):
        first = peer.backend.pid
        replies = await asyncio.gather(*(peer.backend.infer(ask(f"die {n % 3}")) for n in range(12)))
        assert len(replies) == 12
        assert peer.backend.pid != first
    assert sum(line.startswith("born") for line in peer.heard()) == 3


async def test_a_request_that_kills_every_process_fails_as_data_and_the_others_go_on(tmp_path: Path) -> None:
    async with stand_in(tmp_path) as peer, asyncio.timeout(20):
        with pytest.raises(Unavailable, match="SIGKILL"):
            await peer.backend.infer(ask("die 99"))
        assert sum(line.startswith("born") for line in peer.heard()) == 3
        assert (await peer.backend.probe()).state == "down", "until a request starts a new one"
        assert (await peer.backend.infer(ask("say hello"))).text == "hello"
        assert (await peer.backend.probe()).state == "up"


async def test_a_grammar_that_the_engine_refuses_fails_its_own_request_only(tmp_path: Path) -> None:
    async with stand_in(tmp_path) as peer, asyncio.timeout(20):
        waiting = asyncio.create_task(peer.backend.infer(ask("die 1")))
        with pytest.raises(Rejected, match="grammar"):
            await peer.backend.infer(ask("poison"))
        await waiting


async def test_a_start_that_is_cancelled_leaves_no_process(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    start = asyncio.create_task(EngineProcess.start(STAND_IN, {"path": str(path)}))
    await asyncio.sleep(0)
    start.cancel()
    with pytest.raises(asyncio.CancelledError):
        await start
    async with asyncio.timeout(20):
        while any(STAND_IN in _command(child) for child in _children()):
            await asyncio.sleep(0.01)


def _children() -> list[str]:
    return [pid for task in Path("/proc/self/task").iterdir() for pid in _read(task / "children").split()]


def _command(pid: str) -> str:
    return _read(Path("/proc", pid, "cmdline"))


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:  # it has ended
        return ""


async def test_cancelling_tells_the_engine(tmp_path: Path) -> None:
    async with stand_in(tmp_path) as peer, asyncio.timeout(20):
        task = asyncio.create_task(peer.backend.infer(ask("hang")))
        await peer.wait_heard(lambda lines: "asked 1 hang" in lines)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await peer.wait_heard(lambda lines: "cancel 1" in lines)
        assert (await peer.backend.infer(ask("say hello"))).text == "hello"


@pytest.mark.parametrize(
    ("text", "kind"),
    [("refuse context", ContextOverflow), ("refuse invalid", Rejected)],
)
async def test_a_refusal_is_an_error_of_its_type(tmp_path: Path, text: str, kind: type[Exception]) -> None:
    async with stand_in(tmp_path) as peer:
        with pytest.raises(kind, match="no"):
            await peer.backend.infer(ask(text))


async def test_an_answer_that_was_cut_keeps_its_text(tmp_path: Path) -> None:
    async with stand_in(tmp_path) as peer:
        with pytest.raises(Truncated) as caught:
            await peer.backend.infer(ask("cut Once upon a"))
    assert caught.value.text == "Once upon a"
    assert caught.value.usage == Usage(prompt_tokens=9, cached_tokens=4, completion_tokens=2)


async def test_leaving_ends_the_process_and_whoever_still_waits_is_told(tmp_path: Path) -> None:
    async with stand_in(tmp_path) as peer, asyncio.timeout(20):
        pid = peer.backend.pid
        assert pid is not None
        waiting = asyncio.create_task(peer.backend.infer(ask("hang")))
        await peer.wait_heard(lambda lines: "asked 1 hang" in lines)
        async with peer.backend:
            pass
        assert peer.backend.pid == pid, "an inner user leaves it open"
        await peer.backend.__aexit__(None, None, None)
        with pytest.raises(Unavailable, match="closed"):
            await waiting
        assert not is_alive(pid)
        await peer.backend.__aenter__()
        assert (await peer.backend.infer(ask("say again"))).text == "again"


async def test_a_model_that_cannot_be_loaded_is_said_before_any_job(tmp_path: Path) -> None:
    (tmp_path / "m.gguf.broken").write_text("")
    with pytest.raises(SpecError, match="cannot read it"):
        async with stand_in(tmp_path):
            pass


def patterned(**options: Any) -> RequestShape:
    return RequestShape(model="", schema={"type": "string", "pattern": "^a+$"}, **options)


def test_what_no_grammar_forces_is_said_once_before_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    backend = StandIn(tmp_path / "m.gguf").backend
    for shape in (patterned(), patterned(max_tokens=9)):
        backend.check(shape)
    assert [record.message for record in caplog.records if "pattern" in record.message] == [
        "not enforced by the grammar, only validated: the answer's schema (#: pattern of string)"
    ]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"extra_body": {"best_of": 2}}, "repetition_penalty"),
        ({"extra_body": {"top_k": 0.5}}, "whole number"),
        ({"extra_body": {"min_p": True}}, "number, not True"),
        ({"model": "gpt-5"}, "gpt-5"),
        ({"tools": (ToolSpec("t", "", {"type": "object"}),), "tool_choice": "u"}, "tool_choice"),
    ],
)
def test_a_shape_it_cannot_run_is_refused_before_anything_is_sent(
    tmp_path: Path, options: dict[str, Any], says: str
) -> None:
    with pytest.raises(SpecError, match=says):
        StandIn(tmp_path / "m.gguf").backend.check(RequestShape(**{"model": "m", **options}))


PARENT = """
import asyncio, sys
from pathlib import Path
from batch_agent.backends.local.backend import LocalBackend
from batch_agent.backends.local.backend import EngineOptions
from batch_agent.backends.local.backend import EngineProcess
async def main():
    async with LocalBackend(EngineOptions("m", Path(sys.argv[1]), threads=1), program=sys.argv[2]) as backend:
        print(backend.pid, flush=True)
        await asyncio.Event().wait()
asyncio.run(main())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_no_process_survives_a_parent_that_is_killed(tmp_path: Path) -> None:
    command = [sys.executable, "-c", PARENT, str(tmp_path / "m.gguf"), STAND_IN]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        assert is_alive(child)
        child_is_gone = os.pidfd_open(child)
        parent.send_signal(signal.SIGKILL)
        parent.wait()
    try:
        poll = select.poll()
        poll.register(child_is_gone)
        assert poll.poll(10_000)
    finally:
        os.close(child_is_gone)
