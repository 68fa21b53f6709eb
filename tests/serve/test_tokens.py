"""Tokens per day: reserved before a request is sent, settled after it, and kept through kills."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, cast

import aiohttp
import orjson
import pytest
from tests.serve.served import CHAT, Client, chat, serving
from tests.serve.test_openai_batches import backend
from tests.serve.test_tenants import add
from tests.warm import start

from batch_agent.messages import Usage
from batch_agent.serve import batches
from batch_agent.serve.asking import CHAT as CHAT_DIALECT
from batch_agent.serve.asking import MESSAGES, PassedEvents, tokens_needed
from batch_agent.serve.catalog import Catalog, Tenant
from batch_agent.serve.ledger import DayUsed, TokenLedger
from batch_agent.testing import Fail, Hang, Request, Say
from batch_agent.testing.replies import ScriptedReply

USED = Usage(20, 0, 180)  # of an answer
PERSON = {"model": "m", "max_tokens": 180, "messages": [{"role": "user", "content": "hello " * 10}]}


def answer(request: Request) -> ScriptedReply:
    return Say("word " * 180, usage=USED)


async def status(client: Client, name: str) -> Any:
    return (await client.get("/serve/status"))["tenants"][name]


async def settled(client: Client, name: str) -> int:
    """Return the tokens that a tenant used today, when none of its requests is in flight."""
    while (await status(client, name))["tokens_reserved"]:
        await asyncio.sleep(0.01)
    return int((await status(client, name))["tokens_today"])


async def test_people_who_ask_at_once_do_not_pass_the_limit_together(tmp_path: Path) -> None:
    async with (
        backend(lambda request: Say("word", usage=USED, latency=0.1)) as model,
        serving(tmp_path, model) as client,
    ):
        one = add(client, "one", tokens_per_day=500)
        told = await asyncio.gather(*(one.send("POST", CHAT, PERSON) for _ in range(24)))
        assert sorted({status for status, _ in told}) == [200, 429]
        assert model.received == 2 and await settled(client, "one") == 400
        code = {document["error"]["code"] for status, document in told if status == 429}
        assert code <= {"rate_limit_exceeded", "insufficient_quota"}
        status, document = await one.send("POST", CHAT, PERSON)
        assert status == 429 and document["error"]["code"] == "insufficient_quota"
        assert (await client.post(CHAT, PERSON))["usage"]["completion_tokens"] == 180  # the operator has no limit


async def test_streams_that_are_left_count_what_was_generated(tmp_path: Path) -> None:
    def script(request: Request) -> ScriptedReply:
        return Say("word " * 180, chunk_delay=0.005)

    async with backend(script) as model, serving(tmp_path, model) as client:
        one = add(client, "one", tokens_per_day=1000)
        headers, refused = {"Authorization": f"Bearer {one.key}"}, 0
        for _ in range(40):
            async with client.session.post(client.url + CHAT, json={**PERSON, "stream": True}, headers=headers) as left:
                refused += left.status == 429
                for _ in range(20):
                    await left.content.readline()
            await settled(client, "one")
        used = await settled(client, "one")
        assert refused >= 20 and 700 < used <= 1000
        assert model.received == 40 - refused


async def test_an_answer_that_is_not_awaited_counts_its_reservation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batches, "GRACE_SECONDS", 0.02)
    async with (
        backend(lambda request: Hang()) as model,
        serving(tmp_path, model, interactive_latency=None) as client,
    ):
        one = add(client, "one", tokens_per_day=1000)
        for stream in (False, True):
            before = model.received
            asked = asyncio.create_task(one.send("POST", CHAT, {**PERSON, "stream": stream}))
            await model.wait_requests(before + 1)
            asked.cancel()
            await asyncio.wait({asked})
        assert 400 <= await settled(client, "one") <= 440
        batch = await one.create([chat("a", max_tokens=100)])
        await model.wait_requests(3)
        await one.post(f"/v1/batches/{batch['id']}/cancel")
        await one.wait(batch["id"])
        assert 500 <= await settled(client, "one") <= 580


async def test_what_fails_or_is_refused_costs_nothing(tmp_path: Path) -> None:
    async with backend(lambda request: Fail(400)) as model, serving(tmp_path, model) as client:
        one = add(client, "one", tokens_per_day=1000)
        done = await one.wait((await one.create([chat("a", max_tokens=100)]))["id"])
        assert done["request_counts"]["failed"] == 1
        assert (await one.send("POST", CHAT, PERSON))[0] == 400 and await settled(client, "one") == 0


async def test_a_stream_counts_the_usage_that_its_client_did_not_ask_for(tmp_path: Path) -> None:
    async with backend(answer) as model, serving(tmp_path, model) as client:
        one = add(client, "one", tokens_per_day=1000)
        for asks in (False, True):
            body = {**PERSON, "stream": True, **({"stream_options": {"include_usage": True}} if asks else {})}
            headers = {"Authorization": f"Bearer {one.key}"}
            async with client.session.post(client.url + CHAT, json=body, headers=headers) as streamed:
                text = await streamed.read()
            data = [part.removeprefix(b"data: ") for part in text.split(b"\n\n") if part]
            assert data[-1] == b"[DONE]"
            assert any(not orjson.loads(part)["choices"] for part in data[:-1]) == asks
            assert await settled(client, "one") == 200 * (1 + asks)


async def test_an_answer_without_a_limit_gets_what_is_left_of_the_day(tmp_path: Path) -> None:
    async with (
        backend(lambda request: Say("word", usage=Usage(20, 0, 100))) as model,
        serving(tmp_path, model) as client,
    ):
        one = add(client, "one", tokens_per_day=300)
        free = {name: value for name, value in PERSON.items() if name != "max_tokens"}
        assert (await one.send("POST", CHAT, free))[0] == 200
        first = model.requests[-1].body["max_tokens"]
        assert (await one.send("POST", CHAT, free))[0] == 200
        assert 240 < first < 300 and model.requests[-1].body["max_tokens"] == first - 120
        await client.post(CHAT, free)
        assert "max_tokens" not in model.requests[-1].body  # the operator has no limit


async def test_lines_do_not_pass_the_limit_and_one_that_never_fits_fails_alone(tmp_path: Path) -> None:
    async with backend(answer) as model, serving(tmp_path, model) as client:
        one = add(client, "one", tokens_per_day=1000)
        lines = [chat(str(number), max_tokens=180) for number in range(20)]
        batch = await one.create([chat("huge", max_tokens=5000), *lines])
        while (await client.get("/serve/status"))["waiting_because"] != "the tokens of this day are used up":
            await asyncio.sleep(0.01)
        assert await settled(client, "one") == 1000 and model.received == 5
        while (await client.get(f"/serve/batches/{batch['id']}"))["summary"] != "5 of 21 done, 1 failed":
            await asyncio.sleep(0.01)
        (row,) = (await client.get(f"/serve/batches/{batch['id']}/rows?state=failed"))["data"]
        assert row["custom_id"] == "huge" and "more than the 1000 of a whole day" in row["error"]


@asynccontextmanager
async def killed(data: Path, backend_url: str) -> AsyncIterator[Client]:
    command = ("-m", "batch_agent", "serve", "--data", str(data), "--backend", backend_url, "--port", "0")
    process = await start(*command, "--reserve", "1K", stdout=asyncio.subprocess.PIPE)
    try:
        assert process.stdout is not None
        url = (await process.stdout.readline()).decode().strip()
        key = (await process.stdout.readline()).decode().rpartition("=")[2].strip()
        async with aiohttp.ClientSession() as session:
            yield Client(url, key, session, cast("Any", None))
    finally:
        os.kill(process.pid, signal.SIGKILL)
        await process.wait()


async def test_kills_do_not_lose_what_was_counted(tmp_path: Path) -> None:
    """What the model server has used, killed requests too, stays below the limit over two kills."""
    with Catalog(tmp_path) as catalog:
        catalog.operator_key()
        key = catalog.add_tenant(Tenant("one", tokens_per_day=3000))

    def script(request: Request) -> ScriptedReply:
        return Say("word", usage=USED, latency=0.02 if model.received % 4 else 0.5)

    async with backend(script) as model:
        for turn in range(3):
            before = model.received
            async with killed(tmp_path, model.backend_url) as client:
                one = client.with_key(key)
                if not turn:
                    await one.create([chat(str(number), max_tokens=180) for number in range(60)])
                people = [asyncio.create_task(one.send("POST", CHAT, PERSON)) for _ in range(2)]
                if turn < 2:
                    await model.wait_requests(before + 4)
                else:
                    while (await client.get("/serve/status"))["waiting_because"] is None:
                        await asyncio.sleep(0.02)
                for person in people:
                    person.cancel()
                await asyncio.wait(people)
        assert 7 <= model.received <= 15  # of 200 tokens each


async def test_ledgers_of_several_processes_hold_the_limit_together(tmp_path: Path) -> None:
    """Processes come, are killed and go on; whatever they do, no tenant uses more than its limit in a day."""
    rng, clock = random.Random(7), [86400.0 * 1000]
    with Catalog(tmp_path, clock=lambda: clock[0]) as catalog:
        for day in range(6):
            spent, flying = 0, list[tuple[TokenLedger, int]]()
            ledgers = [TokenLedger(catalog) for _ in range(3)]
            for step in range(60):
                ledger, need = rng.choice(ledgers), rng.randint(1, 120)
                ledger.set_limit("one", 2000)
                choice = rng.random()
                if choice < 0.45:
                    if ledger.may_take("one", need, need):
                        flying.append((ledger, ledger.take("one", need, need)))
                elif choice < 0.6:
                    waiting = asyncio.create_task(ledger.reserve("one", need, need))
                    await asyncio.sleep(0)
                    await ledger.write()
                    with suppress(DayUsed):
                        flying.append((ledger, await waiting))
                elif choice < 0.85 and flying:
                    of, reserved = flying.pop(rng.randrange(len(flying)))
                    used = rng.randint(0, reserved)
                    spent += used
                    of.settle("one", reserved, used)
                elif choice < 0.9:  # a kill: its requests have cost something
                    at = rng.randrange(len(ledgers))
                    spent += sum(rng.randint(0, reserved) for of, reserved in flying if of is ledgers[at])
                    flying = [(of, reserved) for of, reserved in flying if of is not ledgers[at]]
                    ledgers[at] = TokenLedger(catalog)
                else:
                    await ledger.write()
                assert spent + sum(reserved for _, reserved in flying) <= 2000, (day, step)
            for ledger in ledgers:
                await ledger.close()
            used = catalog.used_today()["one"]
            assert spent <= used <= 2000
            clock[0] += 86400.0
            assert catalog.used_today() == {}


async def test_a_request_that_leaves_while_it_waits_for_tokens_gives_them_back(tmp_path: Path) -> None:
    with Catalog(tmp_path) as catalog:
        ledger = TokenLedger(catalog)
        ledger.set_limit("one", 100)
        waiting = asyncio.create_task(ledger.reserve("one", 100, 100))
        await asyncio.sleep(0)
        writing = asyncio.create_task(ledger.write())
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait({waiting, writing})
        again = asyncio.create_task(ledger.reserve("one", 100, 100))
        await asyncio.sleep(0)
        await ledger.write()
        assert await again == 100
        with pytest.raises(DayUsed) as refused:
            await ledger.reserve("one", 101, 101)
        assert not refused.value.for_now
        ledger.settle("one", 100, 0)
        await ledger.close()


def test_what_a_request_may_use() -> None:
    assert tokens_needed(CHAT_DIALECT, {"messages": "x" * 384, "max_tokens": 10, "n": 3}, 0).most == 100 + 30
    picture: Any = {"messages": [{"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 900_000}}]}
    assert tokens_needed(CHAT_DIALECT, picture, 0).prompt < 1100
    assert tokens_needed(MESSAGES, {"messages": [], "max_tokens": 7}, 0).answer == 7
    unknown = tokens_needed(CHAT_DIALECT, {"messages": "hi"}, 9000)
    assert unknown.answer is None and unknown.most == unknown.prompt + 9000


@pytest.mark.parametrize("size", [1, 7, 10_000])
@pytest.mark.parametrize("gap", [b"\n\n", b"\r\n\r\n"])
def test_events_are_passed_on_whole_however_they_arrive(size: int, gap: bytes) -> None:
    events = [b"event: message_start", b'data: {"message": {"usage": {"input_tokens": 3}}}', b'data: {"a": "\\n"}']
    events += [b'data: {"usage": {"output_tokens": 5}}', b'data: {"choices": [], "usage": {"prompt_tokens": 4}}']
    text, passed = gap.join([*events, b"data: [DONE]"]) + gap, list[bytes]()
    relay = PassedEvents(passed.append, hidden=True)
    for place in range(0, len(text), size):
        relay.take(text[place : place + size])
    relay.take(b"data: half")
    assert b"".join(passed) == gap.join([*events[:4], b"data: [DONE]"]) + gap
    assert (relay.prompt_tokens, relay.completion_tokens, relay.count) == (4, 5, 5)
