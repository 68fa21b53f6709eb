"""Tenants: everything is separated, shares are by tokens, limits hold."""

from __future__ import annotations

import asyncio
from math import ceil, inf
from pathlib import Path

import pytest
from tests.serve.served import CHAT, Client, chat, serving
from tests.serve.test_anthropic_batches import ROUTE, ask
from tests.serve.test_openai_batches import backend

from batch_agent.backends.base import Load
from batch_agent.cli.main import main
from batch_agent.errors import SpecError
from batch_agent.serve import ServeOptions, server
from batch_agent.serve.catalog import Catalog, Tenant
from batch_agent.serve.line_scheduler import GROUP, HOLD_SECONDS, PENDING, LineSource
from batch_agent.serve.models import open_models
from batch_agent.serve.server import BatchService
from batch_agent.testing import Hang, Request, Say
from batch_agent.testing.replies import ScriptedReply


@pytest.fixture(autouse=True)
def _quick_books(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "BOOKS_SECONDS", 0.02)


def add(client: Client, name: str, **terms: object) -> Client:
    return client.with_key(client.server.catalog.add_tenant(Tenant(name, **terms)))  # type: ignore[arg-type]


async def test_what_belongs_to_another_tenant_does_not_exist(tmp_path: Path) -> None:
    async with backend() as model, serving(tmp_path, model) as client:
        one, other = add(client, "one"), add(client, "other")
        batch = await one.create([chat("a")])
        done = await one.wait(batch["id"])
        messages = await one.post(ROUTE, {"requests": [ask("a")]})
        file, output = done["input_file_id"], done["output_file_id"]
        for path in (
            f"/v1/files/{file}",
            f"/v1/files/{file}/content",
            f"/v1/files/{output}/content",
            f"/v1/batches/{batch['id']}",
            f"{ROUTE}/{messages['id']}",
            f"{ROUTE}/{messages['id']}/results",
        ):
            assert (await other.send("GET", path))[0] == 404, path
        assert (await other.send("DELETE", f"/v1/files/{file}"))[0] == 404
        for path in (f"/v1/batches/{batch['id']}/cancel", f"{ROUTE}/{messages['id']}/cancel"):
            assert (await other.send("POST", path))[0] == 404
        body = {"input_file_id": file, "endpoint": CHAT, "completion_window": "24h"}
        assert (await other.send("POST", "/v1/batches", body))[0] == 404
        for path in ("/v1/files", "/v1/batches", ROUTE):
            assert (await other.get(path))["data"] == []


async def test_equal_shares_get_equal_tokens_and_few_lines_do_not_wait_for_many(tmp_path: Path) -> None:
    order: list[str] = []

    def script(request: Request) -> ScriptedReply:
        order.append(request.text.split()[0])
        return Say("word " * 20)

    async with backend(script) as model, serving(tmp_path, model, max_inflight=2) as client:
        one, other = add(client, "one"), add(client, "other")
        many = await one.create([chat(f"l{number}", f"one {number}") for number in range(300)])
        await model.wait_requests(20)
        few = await other.create([chat(f"l{number}", f"other {number}") for number in range(10)])
        await other.wait(few["id"])
        before = order.index("other")
        assert order[before : before + 40].count("other") == 10  # they go in turn, and end after about as many
        assert (await one.wait(many["id"]))["status"] == "completed"


async def test_a_larger_share_gets_more(tmp_path: Path) -> None:
    gate = asyncio.Event()
    order: list[str] = []

    async def script(request: Request) -> ScriptedReply:
        await gate.wait()
        order.append(request.text.split()[0])
        return Say("word " * 20)

    async with backend(script) as model, serving(tmp_path, model, max_inflight=1) as client:
        batches = []
        for name, share in (("large", 3.0), ("small", 1.0)):
            tenant = add(client, name, share=share)
            batches.append((tenant, await tenant.create([chat(f"l{n}", f"{name} {n}") for n in range(80)])))
        while len(client.server.line_scheduler.sources) < 2:
            await asyncio.sleep(0.01)
        await model.wait_requests(1)
        gate.set()
        for tenant, batch in batches:
            await tenant.wait(batch["id"])
        both = order[4:84]
        assert 2.0 <= both.count("large") / both.count("small") <= 4.0


async def test_too_many_queued_lines_fail_the_batch(tmp_path: Path) -> None:
    def script(request: Request) -> ScriptedReply:
        return Hang()

    async with backend(script) as model, serving(tmp_path, model) as client:
        small = add(client, "small", max_queued=10)
        first = await small.create([chat(str(number)) for number in range(8)])
        await small.wait(first["id"], "in_progress")
        second = await small.wait((await small.create([chat(str(number)) for number in range(3)]))["id"])
        assert second["status"] == "failed"
        assert second["errors"]["data"][0]["code"] == "queue_limit_exceeded"
        status, _ = await small.send("POST", ROUTE, {"requests": [ask(str(number)) for number in range(3)]})
        assert status == 429
        assert (await small.wait((await small.create([chat("a")]))["id"], "in_progress"))["status"] == "in_progress"


async def test_batches_that_come_at_once_do_not_pass_the_limit_of_queued_lines_together(tmp_path: Path) -> None:
    async with backend(lambda request: Hang()) as model, serving(tmp_path, model) as client:
        small, files = add(client, "small", max_queued=4), add(client, "other", max_queued=4)
        told = await asyncio.gather(*(small.send("POST", ROUTE, {"requests": [ask("a")]}) for _ in range(12)))
        assert sorted(status for status, _ in told) == [200] * 4 + [429] * 8
        made = await asyncio.gather(*(files.create([chat("a"), chat("b")]) for _ in range(6)))
        states = [(await files.wait(batch["id"], "in_progress"))["status"] for batch in made]
        assert sorted(states) == ["failed"] * 4 + ["in_progress"] * 2


async def test_a_limit_holds_from_the_first_line_of_a_new_tenant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "BOOKS_SECONDS", 60.0)  # it is not looked at again
    async with backend() as model, serving(tmp_path, model) as client:
        small = add(client, "small", tokens_per_day=5)
        await small.create([chat(str(number)) for number in range(30)])
        while client.server.line_scheduler.why != "the tokens of this day are used up":
            await asyncio.sleep(0.01)
        assert model.received < 30


async def test_a_used_up_day_makes_lines_wait(tmp_path: Path) -> None:
    day = [1_000_000.0 * 86400]
    async with backend() as model, serving(tmp_path, model, now=lambda: day[0]) as client:
        small = add(client, "small", tokens_per_day=5)
        batch = await small.create([chat(str(number)) for number in range(30)], completion_window="7d")
        while client.server.line_scheduler.why != "the tokens of this day are used up":
            await asyncio.sleep(0.01)
        assert model.received < 30
        assert (await small.send("POST", CHAT, {"model": "m", "messages": []}))[0] == 400
        status, _ = await small.send("POST", CHAT, {"model": "m", "messages": [{"role": "user", "content": "a"}]})
        assert status == 429
        while (await small.get(f"/v1/batches/{batch['id']}"))["status"] != "completed":
            day[0] += 86400 / 2
            await asyncio.sleep(0.05)


async def test_a_revoked_key_is_refused_and_its_batches_are_cancelled(tmp_path: Path) -> None:
    async with backend(lambda request: Hang()) as model, serving(tmp_path, model) as client:
        one = add(client, "one")
        batch = await one.create([chat("a")])
        await model.wait_requests(1)
        client.server.catalog.revoke("one")
        assert (await one.send("GET", "/v1/batches"))[0] == 401
        while client.server.catalog.batch(batch["id"]).status not in ("cancelling", "cancelled"):  # type: ignore[union-attr]
            await asyncio.sleep(0.01)


def test_keys_are_added_listed_and_revoked_by_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = str(tmp_path / "data")
    options = ["--share", "2", "--max-queued", "5", "--tokens-per-day", "7", "--max-file", "2GB"]
    assert main(["serve", "keys", "add", "alice", *options, "--data", data]) == 0
    key = capsys.readouterr().out.strip()
    with Catalog(Path(data)) as catalog:
        tenant = catalog.tenant_of(key)
        assert tenant is not None and (tenant.name, tenant.share, tenant.max_queued) == ("alice", 2.0, 5)
        assert (tenant.tokens_per_day, tenant.max_file) == (7, 2 * 1024**3)
        assert key.encode() not in (tmp_path / "data" / "serve.db").read_bytes()
    assert main(["serve", "keys", "add", "alice", "--data", data]) == 1
    assert main(["serve", "keys", "list", "--data", data]) == 0
    assert "alice" in capsys.readouterr().out
    assert main(["serve", "keys", "revoke", "alice", "--data", data]) == 0
    assert main(["serve", "keys", "revoke", "alice", "--data", data]) == 1
    with Catalog(Path(data)) as catalog:
        assert catalog.tenant_of(key) is None


def test_without_tenants_it_listens_on_loopback_only_with_a_key_that_stays(tmp_path: Path) -> None:
    models = open_models("http://127.0.0.1:9", {})
    keys = set()
    for _ in range(2):
        service = BatchService(ServeOptions(tmp_path), models)
        keys.add(service.key)
        service.close()
    assert len(keys) == 1
    assert (tmp_path / "key").stat().st_mode & 0o777 == 0o600
    with pytest.raises(SpecError, match="keys add"):
        BatchService(ServeOptions(tmp_path, host="0.0.0.0"), models)
    Catalog(tmp_path).add_tenant(Tenant("one"))
    BatchService(ServeOptions(tmp_path, host="0.0.0.0"), models).close()


class Lines(LineSource):
    """A batch with lines of ten bytes, counted when they start."""

    left = 100

    def __init__(self, name: str, tenant: str) -> None:
        super().__init__(name, tenant, inf)
        self.started = 0

    def offer(self) -> int | None:
        return None if self.closed else 10

    def start(self, expected: float) -> None:
        self.started += 1


async def test_lines_start_in_turns_of_their_tenants_and_only_so_many_without_a_slot(tmp_path: Path) -> None:
    async with backend() as model, serving(tmp_path, model) as client:
        line_scheduler, first, other = client.server.line_scheduler, Lines("b1", "one"), Lines("b2", "two")
        line_scheduler.enter(first)
        for _ in range(4):
            assert line_scheduler.start_next()
        line_scheduler.enter(other)
        while line_scheduler.start_next():
            pass
        assert first.started + other.started == line_scheduler.inflight == PENDING
        assert abs(first.started - 4 - other.started) <= 1  # they share what was left when the other came
        first.close()
        line_scheduler.sent()
        assert line_scheduler.start_next() and first.started + other.started == PENDING + 1
        assert not line_scheduler.start_next()
        line_scheduler.leave(first)
        line_scheduler.leave(other)


async def test_beside_people_lines_start_several_together(tmp_path: Path) -> None:
    async with backend() as model, serving(tmp_path, model) as client:
        line_scheduler, batch = client.server.line_scheduler, Lines("b1", "one")
        governor, now = line_scheduler.governor, asyncio.get_running_loop().time()
        governor.began(now, 0)
        governor.admitted()
        governor.answered(0.5, 50, 0, 0, now)  # a person is still there, and the pace of an idle engine is known
        for _ in range(20):
            governor.answered(0.5, 50, 100, 100, now)  # with room for many lines
        limit = governor.limit(now)
        assert limit is not None and 8 < limit < PENDING
        line_scheduler.enter(batch)
        while line_scheduler.start_next():
            line_scheduler.sent()
        assert batch.started == limit
        group = ceil(limit * GROUP)
        for _ in range(group - 1):
            line_scheduler.ended(batch, 1, 1.0, sent=True)
            assert not line_scheduler.start_next()
        line_scheduler.ended(batch, 1, 1.0, sent=True)
        while line_scheduler.start_next():
            line_scheduler.sent()
        assert batch.started == limit + group
        line_scheduler.ended(batch, 1, 1.0, sent=True)
        assert not line_scheduler.start_next()
        await asyncio.sleep(1.1 * HOLD_SECONDS)  # one line alone does not wait for long
        line_scheduler.start_next()
        assert batch.started == limit + group + 1
        line_scheduler.leave(batch)


async def test_requests_that_were_just_sent_are_not_taken_for_a_queue_of_the_engine(tmp_path: Path) -> None:
    async with backend() as model, serving(tmp_path, model) as client:
        line_scheduler = client.server.line_scheduler
        (endpoint,) = line_scheduler._dispatcher.scheduler.endpoints
        endpoint.inflight += 1
        line_scheduler.governor.began(0.0, 0)
        for _ in range(3):
            line_scheduler.note_sent(endpoint.name)
        await line_scheduler.read(endpoint, Load(running=9, waiting=3))
        assert not line_scheduler.may_wait_in_engine()  # these wait for its next step
        await line_scheduler.read(endpoint, Load(running=9, waiting=4))
        assert line_scheduler.may_wait_in_engine()  # one has waited for longer
        await line_scheduler.read(endpoint, Load(running=9, waiting=0))
        assert not line_scheduler.may_wait_in_engine()
        endpoint.inflight -= 1
