"""``batch-agent fleet``, as it is typed."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from tests.cli.commandline import batch_agent, started

from batch_agent.cli.commands.fleet import bench_table, status_table
from batch_agent.cli.main import main
from batch_agent.fleet.bench import Bench, MeasuredAnswer, Measurement
from batch_agent.fleet.hostfile import parse_hostfile, parse_hosts
from batch_agent.fleet.probe import Look, read_told
from batch_agent.messages import Usage
from batch_agent.testing import Say, ScriptedServer
from batch_agent.testing.server import SimulatedServer


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AURORA_SWARM_HOSTFILE", raising=False)
    monkeypatch.delenv("BATCH_AGENT_API_KEY", raising=False)


@pytest.fixture
def nobody() -> Iterator[Callable[[], str]]:
    """Places that are taken, and where no one listens."""
    with ExitStack() as taken:

        def place() -> str:
            held = taken.enter_context(socket.socket())
            held.bind(("127.0.0.1", 0))
            return f"127.0.0.1:{held.getsockname()[1]}"

        yield place


async def test_wait_writes_those_that_are_up_with_their_tags(
    tmp_path: Path, nobody: Callable[[], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    hosts, ready = tmp_path / "hosts.txt", tmp_path / "ready.txt"
    async with ScriptedServer(models=["m"]) as first, ScriptedServer(models=["m"]) as second:
        hosts.write_text(f"{first.address} role=worker node=r1\n{nobody()}\n{second.address}\trole=critic\n")
        status, out, err = await batch_agent(
            tmp_path, "fleet", "wait", str(hosts), "--min-fraction", "0.6", "--output", str(ready)
        )
        assert (status, out) == (0, "")
        assert "2 of 3 endpoints up" in err
        endpoints = parse_hostfile(ready)
        assert [endpoint.place for endpoint in endpoints] == [first.address, second.address]
        assert [dict(endpoint.tags) for endpoint in endpoints] == [{"role": "worker", "node": "r1"}, {"role": "critic"}]
        assert [path.name for path in sorted(tmp_path.iterdir())] == ["hosts.txt", "ready.txt"]
        monkeypatch.setenv("AURORA_SWARM_HOSTFILE", str(hosts))
        status, out, _ = await batch_agent(tmp_path, "fleet", "wait", "--min-hosts", "1")
        assert status == 0
        assert len(out.splitlines()) == 2


async def test_wait_ends_with_an_error_when_too_few_come_up(tmp_path: Path, nobody: Callable[[], str]) -> None:
    hosts, ready = tmp_path / "hosts.txt", tmp_path / "ready.txt"
    async with ScriptedServer(models=["m"]) as server:
        missing = [nobody() for _ in range(7)]
        hosts.write_text("\n".join([server.address, *missing]))
        status, out, err = await batch_agent(
            tmp_path, "fleet", "wait", str(hosts), "--min-hosts", "2", "--timeout", "0.5", "--output", str(ready)
        )
    assert (status, out) == (4, "")
    assert "1 of 8 endpoints up after 0:00; 2 are needed" in err
    assert f"{missing[0]}  /health: connection refused" in err
    assert "and 2 more" in err
    assert not ready.exists()


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["wait"], "no hostfile: batch-agent fleet wait HOSTFILE, or set AURORA_SWARM_HOSTFILE"),
        (["wait", "nowhere.txt"], "'nowhere.txt' cannot be read"),
        (["wait", "hosts.txt", "--min-hosts", "3"], "3 endpoints can never be up: the hostfile lists 2"),
        (["wait", "hosts.txt", "--output", "no/such/ready.txt"], "there is no such directory"),
        (["status", "empty.txt"], "names no endpoint"),
        (["bench", "wrong.txt"], "line 2 of the hostfile"),
    ],
)
def test_what_is_wrong_is_named(
    words: list[str],
    complaint: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("hosts.txt").write_text("a\nb\n")
    Path("empty.txt").write_text("# nobody\n")
    Path("wrong.txt").write_text("a\nb c d\n")
    assert main(["fleet", *words]) == 1
    assert complaint in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["wait", "h", "--min-hosts", "0"],
        ["wait", "h", "--min-fraction", "1.5"],
        ["wait", "h", "--timeout", "nan"],
        ["bench", "h", "--steps", "16,0"],
        ["proxy", "h", "--port", "65536"],
    ],
)
def test_wrong_arguments_are_refused(words: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["fleet", *words])
    assert ended.value.code == 1


async def test_status_is_a_table_in_which_the_dead_have_a_row(tmp_path: Path, nobody: Callable[[], str]) -> None:
    hosts = tmp_path / "hosts.txt"
    async with SimulatedServer() as server, ScriptedServer(models=["tiny"]) as other:
        hosts.write_text(f"{server.address} role=worker\n{nobody()}\n{other.address}")
        status, out, err = await batch_agent(tmp_path, "fleet", "status", str(hosts))
        hosts.write_text(f"{other.address} role=worker\n{nobody()}")
        _, text, _ = await batch_agent(tmp_path, "fleet", "status", str(hosts), "--json")
    assert (status, err) == (0, "")
    head, up, down, plain, total = out.splitlines()
    assert head.split() == ["endpoint", "up", "in", "flight", "queue", "tokens/s", "KV", "prefix", "errors"]
    assert up.split() == [server.address, "up", "0", "0", "0", "0%", "-", "0", "simulated"]
    assert "down  /health: connection refused" in down
    assert plain.split() == [other.address, "up", "0", "0", "-", "-", "-", "-", "tiny"]
    assert total == "2 of 3 endpoints up, 0 in flight, 0 queued, 0 tokens/s"
    document = json.loads(text)
    assert (document["up"], document["total"]) == (1, 2)
    first, second = document["endpoints"]
    assert (first["endpoint"], first["tags"], first["up"]) == (f"vllm://{other.address}", {"role": "worker"}, True)
    assert (first["in_flight"], first["tokens_per_second"], first["models"]) == (0, None, ["tiny"])
    assert (second["up"], second["in_flight"]) == (False, None)
    assert "refused" in second["reason"]


async def test_a_watched_status_follows_the_hostfile(tmp_path: Path) -> None:
    hosts = tmp_path / "hosts.txt"
    async with ScriptedServer(models=["m"]) as server:
        hosts.write_text(server.address)
        async with started(tmp_path, "fleet", "status", str(hosts), "--watch", "--json") as process:
            assert process.stdout is not None
            assert json.loads(await process.stdout.readline())["total"] == 1
            hosts.write_text(f"{server.address}\n{server.address} role=again\n")
            while json.loads(await process.stdout.readline())["total"] != 2:
                pass
            process.send_signal(signal.SIGINT)
            assert await process.wait() == 130


def test_tables_stay_within_the_terminal_and_show_what_servers_say_as_text() -> None:
    hosts = parse_hosts("\n".join(["a", "b" * 60]), "test")
    told = read_told("vllm:num_requests_running 5\nvllm:kv_cache_usage_perc 0.5\nvllm:generation_tokens_total 9\n")
    looks = [
        Look(hosts[0], up=True, models=("m",), told=told, tokens_per_second=12345.6),
        Look(hosts[1], up=False, reason="\x1b[31mred" + "x" * 100),
    ]
    text = status_table(looks, 80)
    assert "\x1b" not in text
    assert max(map(len, text.splitlines())) <= 80
    assert "12.3k" in text
    assert "50%" in text


def test_the_table_of_a_bench_has_a_column_for_each_step() -> None:
    one, other = (Bench(host) for host in parse_hosts("a\nb", "test"))
    one.steps = [Measurement(2, [MeasuredAnswer(1.0, 1.0, Usage(completion_tokens=100))] * 2)]
    other.reason = "connection refused"
    head, first, second = bench_table([one, other], (2, 4), None).splitlines()
    assert head.split() == ["endpoint", "2", "4", "knee"]
    assert first.split() == ["a:8000", "200", "-", "2"]
    assert second.split(maxsplit=4) == ["b:8000", "-", "-", "-", "connection refused"]


async def test_bench_prints_a_knee_and_an_interrupt_what_was_measured(
    tmp_path: Path, nobody: Callable[[], str]
) -> None:
    hosts = tmp_path / "hosts.txt"
    async with ScriptedServer(lambda request: Say("x", latency=0.01), models=["m"]) as server:
        hosts.write_text(f"{server.address}\n{nobody()}\n")
        short = ("--seconds", "0.1", "--tokens-in", "20", "--tokens-out", "5")
        status, out, err = await batch_agent(tmp_path, "fleet", "bench", str(hosts), *short, "--steps", "1,2", "--json")
        assert status == 0
        good, dead = json.loads(out)["endpoints"]
        assert [step["in_flight"] for step in good["steps"]] == [1, 2]
        assert good["knee"] in (1, 2)
        assert (dead["steps"], dead["knee"]) == ([], None)
        assert "refused" in dead["reason"]
        assert "Ctrl-C prints the results so far" in err
        hosts.write_text(server.address)
        async with started(
            tmp_path, "fleet", "bench", str(hosts), "--seconds", "1000", "--steps", "1", "--tokens-in", "20"
        ) as process:
            await server.wait_until(lambda: server.received > 60)
            process.send_signal(signal.SIGINT)
            out_bytes, _ = await process.communicate()
        assert process.returncode == 130
        assert b"knee" in out_bytes


async def test_a_bench_of_nobody_ends_with_an_error(tmp_path: Path, nobody: Callable[[], str]) -> None:
    hosts = tmp_path / "hosts.txt"
    hosts.write_text(nobody())
    status, out, _ = await batch_agent(tmp_path, "fleet", "bench", str(hosts), "--seconds", "0.1")
    assert status == 4
    assert "refused" in out


async def test_proxy_says_where_it_is_and_stops_at_an_interrupt(tmp_path: Path) -> None:
    hosts = tmp_path / "hosts.txt"
    async with ScriptedServer(lambda request: Say("hello"), models=["m"]) as server:
        hosts.write_text(server.address)
        async with started(tmp_path, "fleet", "proxy", str(hosts), "--port", "0") as process:
            assert process.stderr is not None
            words = (await process.stderr.readline()).decode()
            assert words.startswith("1 endpoint at http://127.0.0.1:")
            host, _, port = words.split()[3].removeprefix("http://").removesuffix("/v1;").rpartition(":")
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            assert b'"id":"m"' in await reader.read()
            writer.close()
            process.send_signal(signal.SIGINT)
            assert await process.wait() == 0
