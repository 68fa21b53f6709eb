"""The page's server: who may ask it, what it tells of a record, and that it leaves the record alone."""

from __future__ import annotations

import asyncio
import csv
import io
import json
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from tests.view.world import HOSTILE, recorded, triage

from batch_agent import Pipeline
from batch_agent.cli.main import main
from batch_agent.testing import Fail, Request, Say, ScriptedServer
from batch_agent.view.runs import ShownRuns
from batch_agent.view.server import ViewServer


class Client:
    def __init__(self, address: str, session: aiohttp.ClientSession) -> None:
        self.base, _, rest = address.partition("/?token=")
        self.token = rest.partition("#")[0]
        self.session = session

    async def get(self, what: str, **asked: Any) -> Any:
        parameters = {"token": self.token, **{name: str(value) for name, value in asked.items()}}
        async with self.session.get(f"{self.base}/api/{what}", params=parameters) as answer:
            return json.loads(await answer.text())

    async def rows(self, **asked: Any) -> Any:
        """A page of rows, once all are indexed."""
        async with asyncio.timeout(30):
            while not (page := await self.get("rows", **asked))["index"]["complete"]:
                pass
        return page


@asynccontextmanager
async def page_of(*paths: Path, directory: Path | None = None) -> AsyncIterator[Client]:
    address: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def ready(found: str) -> None:
        address.set_result(found)
        await asyncio.Event().wait()

    serving = asyncio.create_task(ViewServer(ShownRuns(paths, directory)).serve(ready))
    try:
        async with aiohttp.ClientSession(cookie_jar=aiohttp.DummyCookieJar()) as session:
            yield Client(await address, session)
    finally:
        serving.cancel()
        with suppress(asyncio.CancelledError):
            await serving


@pytest.fixture(scope="module")
def over(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 60 rows that is over."""
    path = tmp_path_factory.mktemp("view") / "over"
    asyncio.run(recorded(path))
    return path


def content(path: Path) -> dict[str, bytes]:
    return {found.name: found.read_bytes() for found in sorted(path.iterdir()) if found.is_file()}


# Who may ask


async def test_without_the_token_nothing_is_told(over: Path) -> None:
    async with page_of(over) as page:
        for token in ("", "wrong", page.token[:-1]):
            async with page.session.get(f"{page.base}/api/run", params={"run": "over", "token": token}) as answer:
                assert answer.status == 403
        async with page.session.get(f"{page.base}/static/app.js") as answer:
            assert answer.status == 403


async def test_the_token_of_the_address_becomes_a_cookie_that_other_sites_do_not_send(over: Path) -> None:
    async with page_of(over) as page:
        async with page.session.get(f"{page.base}/", params={"token": page.token}) as answer:
            cookie = answer.headers["Set-Cookie"]
            policy = answer.headers["Content-Security-Policy"]
        assert "HttpOnly" in cookie and "SameSite=Strict" in cookie
        assert "default-src 'none'" in policy and "unsafe" not in policy
        async with page.session.get(f"{page.base}/api/runs", headers={"Cookie": cookie.partition(";")[0]}) as answer:
            assert answer.status == 200


@pytest.mark.parametrize(
    "headers",
    [{"Host": "evil.example"}, {"Host": "127.0.0.1:1"}, {"Origin": "http://evil.example"}, {"Origin": "null"}],
)
async def test_another_name_or_another_page_is_refused(over: Path, headers: dict[str, str]) -> None:
    async with page_of(over) as page:
        asked = {"run": "over", "token": page.token}
        async with page.session.get(f"{page.base}/api/run", params=asked, headers=headers) as answer:
            assert answer.status == 403


async def test_control_is_taken_from_the_page_itself_alone(over: Path) -> None:
    async with page_of(over) as page:
        asked = {"run": "over", "token": page.token}
        for headers, status in [({}, 403), ({"Origin": page.base}, 409)]:
            body = {"do": "cancel"}
            async with page.session.post(
                f"{page.base}/api/control", params=asked, json=body, headers=headers
            ) as answer:
                assert answer.status == status  # 409: the run is not alive


async def test_files_outside_the_page_are_not_served(over: Path) -> None:
    async with page_of(over) as page:
        for name in ("../server.py", "..%2fserver.py", "%2e%2e/server.py", "nothing.js"):
            async with page.session.get(f"{page.base}/static/{name}", params={"token": page.token}) as answer:
                assert answer.status == 404


# What is told


async def test_the_overview_has_the_numbers_of_the_run_and_what_is_worth_a_look(over: Path) -> None:
    async with page_of(over) as page:
        await page.rows(run="over")
        told = await page.get("run", run="over")
    assert told["run"]["state"] == "complete" and told["counts"]["rows"] == 60
    assert [(each["type"], each["row"]) for each in told["failures"]] == [("Rejected", 13)]
    assert {(each["kind"], each["row"]) for each in told["unusual"]} >= {("turns", 21), ("cost", 21)}
    assert len(told["status"]["endpoints"]) == 3 and {tool["name"] for tool in told["status"]["tools"]} == {
        "look_up_order",
        "policy",
    }


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        ({"state": "failed"}, [13]),
        ({"error": "Rejected"}, [13]),
        ({"error": "Timeout"}, []),
        ({"q": "T-1007"}, [7]),
        ({"q": "turns:>9"}, [21]),
        ({"q": "HACKED"}, [5]),
        ({"q": 'subject:"broken kettle" index:<6'}, [4]),
        ({"q": "turns"}, []),  # the name of a field is no text
    ],
)
async def test_rows_are_filtered(over: Path, asked: dict[str, str], found: list[int]) -> None:
    async with page_of(over) as page:
        told = await page.rows(run="over", **asked)
    assert [row["index"] for row in told["rows"]] == found and told["total"] == len(found)


async def test_rows_are_sorted_and_paged(over: Path) -> None:
    async with page_of(over) as page:
        slowest = await page.rows(run="over", sort="seconds", dir="desc", limit=5)
        second = await page.rows(run="over", offset=50, limit=50)
    times = [row["seconds"] for row in slowest["rows"]]
    assert len(times) == 5 and times == sorted(times, reverse=True)
    assert [row["index"] for row in second["rows"]] == list(range(50, 60)) and second["total"] == 60


async def test_a_row_is_told_as_a_conversation_with_times_calls_and_its_prompt(over: Path) -> None:
    async with page_of(over) as page:
        await page.rows(run="over")
        told = await page.get("row", run="over", row="T-1004")
    system, user, first, *_ = told["conversation"]
    assert system["role"] == "system" and "tickets of a shop" in system["text"]
    assert user["text"].startswith("Sort ticket T-1004") and first["endpoint"]
    assert [call["name"] for call in first["calls"]] == ["look_up_order", "policy"]
    assert all(call["result"] and call["seconds"] is not None for call in first["calls"])
    assert first["reasoning"] and first["model"] > 0 and told["before"] == 3 and told["after"] == 5


async def test_an_answer_that_was_rejected_is_followed_by_what_was_wrong(over: Path) -> None:
    async with page_of(over) as page:
        repaired = [row["index"] for row in (await page.rows(run="over", q="attempts:>1"))["rows"]]
        told = await page.get("row", run="over", row=repaired[0])
    roles = [message["role"] for message in told["conversation"]]
    repair = next(message for message in told["conversation"] if message["role"] == "repair")
    assert "repair" in roles and repair["error"] == "Invalid" and "urgent" in repair["text"]


async def test_what_is_filtered_is_exported(over: Path) -> None:
    async with page_of(over) as page:
        await page.rows(run="over")
        asked = {"run": "over", "token": page.token, "q": "index:<3"}
        async with page.session.get(f"{page.base}/api/export", params={**asked, "format": "csv"}) as answer:
            table = list(csv.DictReader(io.StringIO(await answer.text())))
        async with page.session.get(f"{page.base}/api/export", params={**asked, "format": "jsonl"}) as answer:
            lines = (await answer.text()).splitlines()
    assert [row["job_id"] for row in table] == ["T-1000", "T-1001", "T-1002"]
    assert [json.loads(line)["index"] for line in lines] == [0, 1, 2]


async def test_the_timeline_has_each_turn_and_tool_call(over: Path) -> None:
    async with page_of(over) as page:
        told = await page.get("timeline", run="over")
        half = sorted(span[2] for span in told["spans"])[len(told["spans"]) // 2]
        later = await page.get("timeline", run="over", **{"from": half})
    kinds = [span[0] for span in told["spans"]]
    assert kinds.count("turn") > 60 and kinds.count("tool") >= 100 and told["samples"]
    assert 0 < len(later["spans"]) < len(told["spans"])


async def test_two_runs_are_compared_by_the_ids_of_their_rows(over: Path, tmp_path: Path) -> None:
    other = await recorded(tmp_path / "other", 40, seed="other")
    async with page_of(over, other) as page:
        told = await page.get("compare", a="over", b="other", limit=500)
        async with page.session.get(
            f"{page.base}/api/export", params={"a": "over", "b": "other", "token": page.token}
        ) as answer:
            table = list(csv.DictReader(io.StringIO(await answer.text())))
    agreement = told["agreement"]
    assert agreement["both"] == 40 and agreement["different"] == len(told["rows"]) == len(table)
    assert agreement["same"] + agreement["different"] == agreement["both_ok"]
    assert all(row["a"]["output"] != row["b"]["output"] for row in told["rows"])


async def test_a_directory_of_runs_is_listed_and_only_its_runs_are_shown(over: Path) -> None:
    async with page_of(directory=over.parent) as page:
        told = await page.get("runs")
        secret = await page.get("run", run="../over")
    assert [run["name"] for run in told["runs"]] == ["over"] and "there is no run" in secret["error"]


# Leaving the record alone


async def test_looking_at_a_run_writes_nothing_into_its_directory(over: Path) -> None:
    before = content(over)
    async with page_of(over) as page:
        await page.rows(run="over", q="kettle")
        await page.get("row", run="over", row="3")
        await page.get("timeline", run="over")
        await page.get("run", run="over")
    assert content(over) == before


async def test_a_killed_run_is_shown_as_far_as_it_came(over: Path, tmp_path: Path) -> None:
    killed = tmp_path / "killed"
    shutil.copytree(over, killed)
    facts = json.loads((killed / "run.json").read_text()) | {"state": "running", "ended": None}
    (killed / "run.json").write_text(json.dumps(facts))
    with (killed / "results.jsonl").open("ab") as file:
        file.write(b'{"index": 99, "job_id": "torn')
    async with page_of(killed) as page:
        async with asyncio.timeout(30):
            while (await page.get("rows", run="killed"))["total"] < 60:  # the index is made in the background
                pass
        told = await page.get("run", run="killed")
    assert told["run"]["state"] == "interrupted"


async def test_a_live_run_is_told_as_it_goes_and_steered(tmp_path: Path) -> None:
    async with triage(tmp_path / "live", 40, pace=0.05, max_inflight=4) as run, page_of(tmp_path / "live") as page:
        results = run.results()
        await anext(results)
        asked = {"run": "live", "token": page.token}
        async with page.session.get(f"{page.base}/api/events", params=asked) as events:
            line = await events.content.readline()
        news = json.loads(line.removeprefix(b"data: "))
        headers = {"Origin": page.base}
        body = {"do": "resize", "inflight": 7}
        async with page.session.post(f"{page.base}/api/control", params=asked, json=body, headers=headers) as answer:
            resized = await answer.json()
        taken = [result async for result in results]
        rows = await page.rows(run="live")
    assert news["alive"] and news["status"]["rows"]["total"] == 40 and 0 < len(news["rows"]) <= 40
    assert resized["status"]["max_inflight"] == 7 and len(taken) == 39 and rows["total"] == 40


async def test_hostile_text_reaches_the_page_as_json_text(over: Path) -> None:
    async with page_of(over) as page:
        await page.rows(run="over")
        told = await page.get("row", run="over", row="5")
    assert told["record"]["input"]["subject"] == HOSTILE and HOSTILE in told["conversation"][1]["text"]


async def judged_twice(run_dir: Path) -> None:
    """A pipeline of two stages at two servers. The second session retries the row that failed in the first."""
    works = False

    def judge(request: Request) -> Say | Fail:
        return Say("good") if works or "mail 3" not in str(request.messages) else Fail(400)

    async with (
        ScriptedServer(judge, models=["small"]) as first,
        ScriptedServer(lambda request: Say("fine"), models=["big"]) as second,
    ):
        for resume in (False, True):
            stages = Pipeline([{"id": f"mail {number}"} for number in range(5)]).map(task="Judge {id}", name="judge")
            stages = stages.map(task="Polish {input}", name="polish", backend=second.backend_url, model="big")
            prices = {"input": 1.0, "output": 1.0}
            options: dict[str, Any] = {"backend": first.backend_url, "model": "small", "prices": prices}
            await stages.run(run_dir=run_dir, resume=resume, **options)
            works = True


async def test_a_pipeline_has_the_same_numbers_in_status_page_and_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place, report = tmp_path / "pipe", tmp_path / "report.html"
    await judged_twice(place)
    assert await asyncio.to_thread(main, ["status", str(place), "--json"]) == 0
    status = json.loads(capsys.readouterr().out)
    assert await asyncio.to_thread(main, ["report", str(place), "-o", str(report)]) == 0
    async with page_of(place) as page:
        async with asyncio.timeout(30):
            while (told := await page.get("run", run="pipe"))["counts"]["rows"] != 10:
                pass
        timeline = await page.get("timeline", run="pipe")
        judged = await page.get("run", run="pipe/judge")
    [written, *_] = data_of(report)["runs"]

    assert (status["rows"]["done"], status["rows"]["ok"], status["sessions"]) == (10, 10, 2)
    assert status["cost_per_row"] == pytest.approx(status["cost"] / 10)
    for shown in (told, written["overview"]):
        assert (shown["progress"]["ok"], shown["progress"]["total"]) == (10, 10)
        assert shown["progress"]["cost"] == status["cost"] and shown["counts"]["rows"] == 10
        assert [(node["name"], node["status"]["rows"]["ok"]) for node in shown["run"]["graph"]] == [
            ("judge", 5),
            ("polish", 5),
        ]
    assert {str(span[3]).partition("/")[0] for span in timeline["spans"]} == {"judge", "polish"}
    servers = {span[5] for span in timeline["spans"] if span[0] == "turn"}
    assert {server.rpartition(", ")[2] for server in servers} == {"small", "big"} and len(servers) == 2
    named = [(each["name"], each["model"]) for each in told["status"]["endpoints"]]
    assert len({address for address, _ in named}) == 2 and {model for _, model in named} == {"small", "big"}
    assert told["run"]["command"] == judged["run"]["command"] == str(place)  # commands are about the whole run


def data_of(report: Path) -> Any:
    """What a report holds."""
    text = report.read_text().partition('<script type="application/json" id="report">')[2]
    return json.loads(text.partition("</script>")[0])


async def test_a_report_of_two_runs_has_their_comparison(over: Path, tmp_path: Path) -> None:
    other = await recorded(tmp_path / "over", 12, seed="other")
    report = tmp_path / "report.html"
    assert await asyncio.to_thread(main, ["report", str(over), str(other), "-o", str(report)]) == 0
    found = data_of(report)
    assert found["named"] == ["over", "over-2"]
    assert found["compare"]["agreement"]["both"] == 12
    assert len(found["compare"]["rows"]) == found["compare"]["agreement"]["different"] > 0
    assert await asyncio.to_thread(main, ["report", *[str(over)] * 3, "-o", str(report)]) == 1
