"""What people and monitoring see: status, lists, export, metrics, and the commands."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import orjson
import pytest
from tests.observe.exposition_rules import read_page
from tests.serve.served import Client, chat, serving
from tests.serve.test_openai_batches import backend, echo
from tests.view.browser import MISSING, PROGRAM, chromium

from batch_agent.cli.main import main
from batch_agent.serve import batches, server
from batch_agent.serve.catalog import Tenant
from batch_agent.serve.numbers import MOST_TENANTS
from batch_agent.testing import Hang, Request


async def command(client: Client, *arguments: str) -> int:
    return await asyncio.to_thread(main, ["serve", *arguments, "--url", client.url, "--key", client.key])


async def test_the_commands_work_by_address_and_by_directory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with backend() as model, serving(tmp_path, model) as client:
        batch = await client.create([chat("a"), chat("b", "refuse")])
        await client.wait(batch["id"])
        assert await command(client, "list") == 0
        assert f"{batch['id']}  completed  operator" in capsys.readouterr().out
        assert await command(client, "status", "--json") == 0
        state = orjson.loads(capsys.readouterr().out)
        assert state["lines_left"] == 0
        assert await command(client, "status") == 0
        told = capsys.readouterr().out
        assert "0 unfinished batches, 0 lines left\n0 lines in flight\n" in told
        assert f"operator: {state['tenants']['operator']['tokens_today']:,} tokens today (UTC), 0 lines" in told
        assert not {"{", "_", "null", "None"} & set(told.replace(model.address, ""))
        tenant = client.with_key(client.server.catalog.add_tenant(Tenant("one")))
        assert await command(tenant, "status") == 0
        assert "tokens today (UTC): 0\n" in capsys.readouterr().out
        output = tmp_path / "out.jsonl"
        assert await command(client, "export", batch["id"], "--output", str(output)) == 0
        assert {orjson.loads(line)["custom_id"] for line in output.read_bytes().splitlines()} == {"a", "b"}
        assert await command(client, "cancel", "batch_none") == 1
        assert await command(client.with_key("wrong"), "list") == 1
    data = ["--data", str(tmp_path)]
    capsys.readouterr()
    assert main(["serve", "list", *data]) == 0
    assert batch["id"] in capsys.readouterr().out
    assert main(["serve", "status", *data]) == 0
    told = capsys.readouterr().out
    assert f"operator: {state['tenants']['operator']['tokens_today']:,} tokens today (UTC)" in told and "{" not in told
    assert main(["serve", "export", batch["id"], "--output", str(output), *data]) == 0
    assert main(["serve", "cancel", batch["id"], *data]) == 0
    assert "completed" in capsys.readouterr().out
    assert main(["serve", "list", "--data", str(tmp_path / "nothing")]) == 1


async def test_a_tenant_sees_its_own_and_the_operator_all(tmp_path: Path) -> None:
    async with backend(lambda request: Hang()) as model, serving(tmp_path, model) as client:
        one = client.with_key(client.server.catalog.add_tenant(Tenant("one")))
        other = client.with_key(client.server.catalog.add_tenant(Tenant("other")))
        batch = await one.create([chat("a")])
        assert [each["id"] for each in (await client.get("/serve/batches"))["data"]] == [batch["id"]]
        assert [each["id"] for each in (await one.get("/serve/batches"))["data"]] == [batch["id"]]
        assert (await other.get("/serve/batches"))["data"] == []
        for path in (f"/serve/batches/{batch['id']}", f"/serve/batches/{batch['id']}/export"):
            assert (await other.send("GET", path))[0] == 404
        assert (await other.send("POST", f"/serve/batches/{batch['id']}/cancel"))[0] == 404
        assert "tenants" not in await one.get("/serve/status")
        assert (await client.get("/serve/status"))["batches"] == 1
        assert (await client.send("POST", f"/serve/batches/{batch['id']}/cancel"))[0] == 200


async def test_the_page_holds_no_data_and_lets_no_other_site_in(tmp_path: Path) -> None:
    async with backend() as model, serving(tmp_path, model) as client:
        async with client.session.get(client.url + "/") as answer:
            text, policy = await answer.text(), answer.headers["Content-Security-Policy"]
        assert client.key not in text and "/static/app.js" in text
        assert "frame-ancestors 'none'" in policy and "unsafe-inline" not in policy
        assert (await client.send("GET", "/static/main.js"))[0] == 404
        other = {"Origin": "http://evil.example"}
        assert (await client.send("POST", "/serve/batches/x/cancel", headers=other))[0] == 403
        assert (await client.send("GET", "/serve/batches", headers={"Host": "evil.example"}))[0] == 403


async def test_the_rows_of_a_batch_are_paged_by_state(tmp_path: Path) -> None:
    def answer(request: Request) -> object:
        return Hang() if "hang" in request.text else echo(request)

    async with backend(answer) as model, serving(tmp_path, model) as client:
        lines = [chat(f"ok-{number}") for number in range(5)] + [chat("bad", "refuse"), chat("slow", "hang")]
        batch = await client.create(lines)
        path = f"/serve/batches/{batch['id']}/rows"
        while (await client.get(f"/serve/batches/{batch['id']}"))["request_counts"] != {
            "total": 7,
            "completed": 5,
            "failed": 1,
        }:
            await asyncio.sleep(0.01)
        found, after = [], 0
        while after is not None:
            page = await client.get(f"{path}?state=succeeded&limit=2&after={after}")
            found += page["data"]
            after = page["next"]
        assert sorted(row["custom_id"] for row in found) == [f"ok-{number}" for number in range(5)]
        one = next(row for row in found if row["custom_id"] == "ok-2")
        assert one["line"] == 3 and one["input"]["messages"][0]["content"] == "say ok-2" and one["error"] is None
        assert one["output"]["choices"][0]["message"]["content"] == "echo say ok-2"
        (bad,) = (await client.get(f"{path}?state=failed"))["data"]
        assert (bad["custom_id"], bad["state"], bad["output"]) == ("bad", "failed", None) and "400" in bad["error"]
        (slow,) = (await client.get(f"{path}?state=waiting"))["data"]
        assert (slow["custom_id"], slow["state"]) == ("slow", "in flight")
        for name in ("ok-4", "bad", "slow"):
            assert [row["custom_id"] for row in (await client.get(f"{path}?custom_id={name}"))["data"]] == [name]
        assert (await client.get(f"{path}?custom_id=none"))["data"] == []
        for query in ("state=odd", "after=-1", "after=7", "limit=0"):
            assert (await client.send("GET", f"{path}?{query}"))[0] == 400
        other = client.with_key(client.server.catalog.add_tenant(Tenant("other")))
        assert (await other.send("GET", path))[0] == 404


async def test_the_rows_of_a_message_batch_that_was_cancelled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "GRACE_SECONDS", 0.02)
    async with backend(lambda request: Hang()) as model, serving(tmp_path, model) as client:
        params = {"model": "m", "max_tokens": 8, "messages": [{"role": "user", "content": "long " * 20_000}]}
        batch = await client.post("/v1/messages/batches", {"requests": [{"custom_id": "a", "params": params}]})
        await model.wait_requests(1)
        await client.post(f"/v1/messages/batches/{batch['id']}/cancel")
        await client.wait_messages(batch["id"])
        (row,) = (await client.get(f"/serve/batches/{batch['id']}/rows?state=failed"))["data"]
        assert (row["custom_id"], row["state"], row["error"]) == ("a", "canceled", "canceled")
        assert isinstance(row["input"], str) and len(row["input"]) < 60_000


@pytest.mark.real
@pytest.mark.skipif(PROGRAM is None, reason=MISSING)
async def test_a_person_logs_in_looks_at_a_batch_and_cancels_it(tmp_path: Path) -> None:
    def answer(request: Request) -> object:
        return Hang() if "hang" in request.text else echo(request)

    async with backend(answer) as model, serving(tmp_path, model) as client, chromium() as page:
        batch = await client.create([chat("one"), chat("<b>two</b>", "refuse"), chat("three", "hang")])
        await model.wait_requests(3)
        await page.goto(client.url + "/")
        await page.until("document.activeElement.id === 'key'")
        for letter in client.key:
            await page.press(letter)
        await page.press("Enter")
        await page.until("document.body.innerText.includes('1 of 3 done, 1 failed')")
        await page.ask("document.querySelector('td.id a').click()")
        await page.until("document.body.innerText.includes('echo say one')")
        press = "[...document.querySelectorAll('button')].find((each) => each.innerText.startsWith('{}')).click()"
        await page.ask(press.format("Failed"))
        await page.until("document.body.innerText.includes('<b>two</b>')")
        await page.ask("window.confirm = () => true")
        await page.ask(press.format("Cancel"))
        await page.until("/cancell(ed|ing)/.test(document.body.innerText)")
        assert (await client.get(f"/serve/batches/{batch['id']}"))["status"] in ("cancelling", "cancelled")
        await page.ask(press.format("Log out"))
        await page.until("document.getElementById('key')")
        assert await page.ask("sessionStorage.length") == 0
        assert page.problems == []
        assert [each for each in page.requests if not each.startswith((client.url, "data:", "about:"))] == []


async def test_the_page_for_prometheus_is_valid_and_the_operators(tmp_path: Path) -> None:
    async with backend() as model, serving(tmp_path, model) as client:
        await client.wait((await client.create([chat("a")]))["id"])
        status, page = await client.with_key("").send("GET", "/metrics")
        assert status == 200 and b'batch_agent_serve_tokens_total{tenant="operator"}' in page
        assert read_page(page.decode())
        client.server.admin.open_metrics = False
        one = client.with_key(client.server.catalog.add_tenant(Tenant("one")))
        assert (await one.send("GET", "/metrics"))[0] == 403
        assert (await client.with_key("").send("GET", "/metrics"))[0] == 401
        assert (await client.send("GET", "/metrics"))[0] == 200


async def test_the_numbers_are_by_tenant_and_outcome(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "GRACE_SECONDS", 0.02)

    def answer(request: Request) -> object:
        return Hang() if "hang" in request.text else echo(request)

    async with backend(answer) as model, serving(tmp_path, model) as client:
        one = client.with_key(client.server.catalog.add_tenant(Tenant("one", tokens_per_day=10_000)))
        await one.wait((await one.create([chat("a"), chat("b"), chat("c", "refuse")]))["id"])
        left = await one.create([chat("d"), *(chat(f"h{number}", "hang") for number in range(3))])
        await client.create([chat("e", "hang")])
        await model.wait_requests(8)
        numbers = await metrics(client)
        for status, tenant in (("in_progress", "one"), ("in_progress", "operator")):
            assert numbers["batches"][(("status", status), ("tenant", tenant))] == 1
        await one.post(f"/v1/batches/{left['id']}/cancel")
        await one.wait(left["id"])
        await client.post("/v1/chat/completions", chat("x", "hello")["body"])
        numbers = await metrics(client)
        done = numbers["lines_done_total"]
        for outcome, count in (("succeeded", 3), ("failed", 1), ("cancelled", 3)):
            assert done[(("outcome", outcome), ("tenant", "one"))] == count
        assert numbers["batches_ended_total"][(("status", "cancelled"), ("tenant", "one"))] == 1
        assert numbers["tokens_per_day"] == {(("tenant", "one"),): 10_000}
        assert numbers["files"][(("tenant", "one"),)] == 6  # two inputs, and output and errors of both
        assert numbers["interactive_duration_seconds_count"] == {(): 1}


async def test_the_label_of_a_tenant_is_bounded_and_the_sums_hold(tmp_path: Path) -> None:
    async with backend() as model, serving(tmp_path, model) as client:
        for number in range(MOST_TENANTS + 20):
            client.server.line_scheduler.account(f"tenant-{number:03}").tokens = 10
        client.server.line_scheduler.account("tenant-001~2").tokens = 5  # a new tenant of the same name
        numbers = (await metrics(client))["tokens_total"]
        assert len(numbers) == MOST_TENANTS + 1 and sum(numbers.values()) == 10 * (MOST_TENANTS + 20) + 5
        assert numbers[(("tenant", "tenant-001"),)] == 15 and numbers[(("tenant", "other"),)] == 10 * 20
        assert (await metrics(client))["tokens_total"] == numbers


async def test_the_numbers_of_a_server_are_those_of_the_page_the_dashboard_and_the_alerts(tmp_path: Path) -> None:
    name = re.compile(r"batch_agent_serve_([a-z_]+[a-z])")
    async with backend() as model, serving(tmp_path, model) as client:
        parts = client.server.admin._numbers
        families = [*parts._of_tenants(), *parts._of_batches(), *parts._of_people(), *parts._of_server()]
        existing = {each.name for each in [*families, *client.server.upstreams.numbers()]}
        existing = {each.removeprefix("batch_agent_serve_") for each in existing}
    (table,) = re.findall(r"\| metric .*?\n\n", (ROOT / "docs/serve.md").read_text(), re.DOTALL)
    documented = {each for row in table.splitlines()[2:] if row for each in re.findall(r"`(\w+)`", row.split("|")[1])}
    assert documented == existing
    for file in ("deploy/grafana/serve.json", "deploy/prometheus/serve-alerts.yml"):
        used = {re.sub("_(bucket|count|sum)$", "", each) for each in name.findall((ROOT / file).read_text())}
        assert used and used <= existing


ROOT = Path(__file__).parents[2]


async def metrics(client: Client) -> dict[str, dict[tuple[tuple[str, str], ...], float]]:
    """Return the values of the page by name, without its prefix, and by labels."""
    status, text = await client.send("GET", "/metrics")
    assert status == 200
    read_page(text.decode())
    found: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
    for line in text.decode().splitlines():
        if not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            name, _, labels = name.partition("{")
            pairs = re.findall(r'(\w+)="([^"]*)"', labels)
            found.setdefault(name.removeprefix("batch_agent_serve_"), {})[tuple(sorted(pairs))] = float(value)
    return found


async def test_a_batch_cancelled_in_the_directory_is_cancelled_by_the_server(tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(server, "BOOKS_SECONDS", 0.02)
        patch.setattr(batches, "GRACE_SECONDS", 0.02)
        async with backend(lambda request: Hang()) as model, serving(tmp_path, model) as client:
            batch = await client.create([chat("a")])
            await model.wait_requests(1)
            await asyncio.to_thread(main, ["serve", "cancel", batch["id"], "--data", str(tmp_path)])
            assert (await client.wait(batch["id"]))["status"] == "cancelled"
