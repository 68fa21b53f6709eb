"""The review on the page: what a reviewer gets, byte for byte, what the link for reviewers reaches, and the keys."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from tests.record.reviewed import CANARY, reviewed_run, tickets, truth
from tests.view.browser import MISSING, PROGRAM, Page, chromium
from yarl import URL

from batch_agent.record.address import place_of
from batch_agent.record.people import PeopleReview
from batch_agent.view.runs import ShownRuns
from batch_agent.view.server import ViewServer

needs_chromium = pytest.mark.skipif(PROGRAM is None, reason=MISSING)
PIXEL = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAoAAAAKCAIAAAACUFjqAAAAEklEQVR4nGP4z8CAB+GTG8HSALfKY52fTcuYAAAAAElFTkSuQmCC"
)


pytestmark = pytest.mark.usefixtures("state")


class Reviewer:
    """A browser without JavaScript, which keeps its cookies and every byte that it gets."""

    def __init__(self, address: str, who: str) -> None:
        self.url, self.who = URL(address), who
        self.session = aiohttp.ClientSession(cookie_jar=aiohttp.CookieJar(unsafe=True))
        self.bytes = b""

    async def ask(self, path: str, body: Any = None, **query: str) -> tuple[int, Any]:
        url = self.url.with_path(path).with_query({"run": self.url.query["run"], **query})
        headers = {} if body is None else {"Origin": str(self.url.origin())}
        method = "GET" if body is None else "POST"
        async with self.session.request(method, url, json=body, headers=headers) as answer:
            data = await answer.read()
            self.bytes += data + repr(answer.headers).encode()
            with suppress(ValueError):
                return answer.status, json.loads(data)
            return answer.status, data

    async def open(self) -> None:
        async with self.session.get(self.url) as answer:
            assert answer.status == 200
            self.bytes += await answer.read()

    async def next(self, **more: Any) -> Any:
        status, answer = await self.ask("/api/review/next", {"who": self.who, **more})
        assert status == 200, answer
        return answer["row"]

    async def judge(self, row: Any, output: Any = None, kind: str = "answer", **more: Any) -> tuple[int, Any]:
        known = {name: row[name] for name in ("row", "queue", "input")}
        return await self.ask("/api/review/judge", {"who": self.who, **known, "kind": kind, "output": output, **more})


@asynccontextmanager
async def served(*places: Any, review: bool = True) -> AsyncIterator[str]:
    """Serve the page of runs; the address of the review if ``review``."""
    address: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def ready(found: str) -> None:
        address.set_result(found)
        await asyncio.Event().wait()

    runs = ShownRuns([place_of(str(place)) for place in places])
    serving = asyncio.create_task(ViewServer(runs, review=runs.first[0] if review else "").serve(ready))
    try:
        await asyncio.wait([serving, address], return_when=asyncio.FIRST_COMPLETED)
        yield address.result()
    finally:
        serving.cancel()
        with suppress(asyncio.CancelledError):
            await serving


@asynccontextmanager
async def reviewers(address: str, *names: str) -> AsyncIterator[list[Reviewer]]:
    people = [Reviewer(address, name) for name in names]
    try:
        for each in people:
            await each.open()
        yield people
    finally:
        for each in people:
            await each.session.close()


def audit(place: Any, rows: int) -> None:
    with PeopleReview.open(str(place)) as review:
        review.audit(rows, "lead")


def label(row: Any) -> dict[str, str]:
    return {"label": truth(int(row["id"].removeprefix("T-")))}


async def test_no_byte_of_an_audit_has_anything_of_the_model(place: str) -> None:
    await reviewed_run(place, 12, samples=1, model="modelname-small")  # two of its rows have failed
    audit(place, 12)
    async with served(place) as address, reviewers(address, "ada", "bob") as people:
        for each in people:
            await each.ask("/api/review", who=each.who)
        given = 0
        for turn in range(100):
            each = people[turn % 2]
            if (row := await each.next(queue="audit")) is None:
                break
            assert row["model"] is None
            if turn % 5 == 0:
                await each.judge(row, kind="skip", only="audit")
                continue
            status, answer = await each.judge(row, {"label": "wrong"}, only="audit")
            assert status == 400
            assert "billing, shipping, account" in answer["error"]
            assert (await each.judge(row, label(row), only="audit"))[0] == 200
            given += 1
            if turn % 7 == 0:
                await each.ask("/api/review/undo", {"who": each.who, "only": "audit"})
        assert given >= 12
        for each in people:
            for secret in (CANARY, "gold", "doubt", "votes", "answered_by", "modelname", "failed", "Rejected"):
                assert secret.encode() not in each.bytes, secret


async def test_the_link_for_reviewers_reaches_the_review_alone(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    await reviewed_run(one, 5)
    await reviewed_run(other, 5)
    async with served(one, other, review=False) as owner:
        token = URL(owner).query["token"]
        async with aiohttp.ClientSession() as session:
            asked = URL(owner).with_path("/api/link").with_query(run="one", token=token)
            async with session.get(asked) as answer:
                link = str(URL(owner).join(URL((await answer.json())["link"])))
        async with reviewers(link, "ada") as [ada]:
            assert (await ada.ask("/api/review", who="ada"))[0] == 200
            assert (await ada.ask("/static/app.css"))[0] == 200
            for path in ("run", "rows", "row", "runs", "timeline", "export", "events", "follow", "compare", "link"):
                status, answer = await ada.ask(f"/api/{path}", row="0", a="one", b="other")
                assert (path, status) == (path, 403)
            for path in ("/", "/static/app.js", "/static/main.js", "/static/index.html", "/nothing"):
                assert (path, (await ada.ask(path))[0]) == (path, 403)
            assert (await ada.ask("/api/control", {"do": "cancel"}))[0] == 403
            assert (await ada.ask("/api/review", who="ada", run="other"))[0] == 403
            assert (await ada.ask("/review", run="other"))[0] == 403
            async with aiohttp.ClientSession() as stranger:
                for url in (ada.url.update_query(token="x" * 64), ada.url.update_query(token=token, run="../x")):
                    async with stranger.get(url) as answer:
                        assert answer.status in (400, 403)
            async with ada.session.post(
                ada.url.with_path("/api/review/next").with_query(run="one"), json={"who": "ada"}
            ) as answer:
                assert answer.status == 403, "a request that acts needs the Origin of the page"


async def test_who_opens_the_link_for_reviewers_beside_the_page_keeps_the_page(tmp_path: Path) -> None:
    await reviewed_run(tmp_path / "run", 3)
    jar = aiohttp.CookieJar(unsafe=True)
    async with served(tmp_path / "run", review=False) as owner, aiohttp.ClientSession(cookie_jar=jar) as session:
        page = URL(owner)
        async with session.get(page) as answer:
            assert answer.status == 200
        async with session.get(page.with_path("/api/link").with_query(run="run")) as answer:
            link = page.join(URL((await answer.json())["link"]))
        for url in (link, page.with_path("/api/run").with_query(run="run")):
            async with session.get(url) as answer:
                assert answer.status == 200


async def test_two_reviewers_share_the_rows_and_a_third_decides(tmp_path: Path) -> None:
    await reviewed_run(tmp_path / "run", 9, overlap=1.0)
    audit(tmp_path / "run", 1)
    async with served(tmp_path / "run") as address, reviewers(address, "ada", "bob", "eve") as [ada, bob, eve]:
        row = await ada.next(queue="audit")
        assert (await ada.judge(row, {"label": "billing"}, only="audit"))[1]["row"] is None
        again = await bob.next(queue="audit")
        assert again["id"] == row["id"]
        _, answer = await bob.judge(again, {"label": "account"}, only="audit")
        assert answer["disputed"]
        assert (await eve.judge(await eve.next(queue="audit"), {"label": "account"}))[0] == 200
        _, overview = await ada.ask("/api/review", who="ada")
        assert overview["left"]["audit"] == {"open": 0, "disputed": 0, "second": 0, "yours": 0, "judged": 1}
        assert any("0 of 1 rows, 0.00 (0.00 to 0.98)" in line for line in overview["lines"])


async def test_a_repair_shows_the_models_answer_and_what_is_wrong_with_it(tmp_path: Path) -> None:
    await reviewed_run(tmp_path / "run", 9)
    async with served(tmp_path / "run") as address, reviewers(address, "ada") as [ada]:
        row = await ada.next()
        assert row["queue"] == "repair"
        assert CANARY in row["model"]["error"]
        for given, why in (
            ({"label": "billing"}, "why has no value"),
            ({"label": "billing", "why": 7}, None),
            (None, "an answer has"),
        ):
            status, answer = await ada.judge(row, given)
            if why is not None:
                assert status == 400
                assert why in answer["error"]


@pytest.mark.parametrize(
    "body",
    [
        *({}, {"who": 1}, {"who": ""}, {"who": "ada"}, {"who": "ada", "row": True, "queue": "audit"}),
        {"who": "ada", "row": 0, "queue": "both"},
        {"who": "ada", "row": 0, "queue": "audit", "kind": "lease", "input": ""},
        {"who": "ada", "row": 99, "queue": "audit", "kind": "none", "input": ""},
    ],
)
async def test_a_request_that_says_nonsense_is_refused(tmp_path: Path, body: Any) -> None:
    await reviewed_run(tmp_path / "run", 3)
    async with served(tmp_path / "run") as address, reviewers(address, "ada") as [ada]:
        status, answer = await ada.ask("/api/review/judge", body)
        assert status == 400
        assert answer["error"]


async def test_images_of_a_row_are_shown_to_who_has_the_row_and_no_other_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "photo.png").write_bytes(PIXEL)
    (tmp_path / "in" / "secret.txt").write_text("a secret")
    (tmp_path / "outside.png").write_bytes(PIXEL)
    monkeypatch.chdir(tmp_path / "in")
    rows = [{**row, "photo": "photo.png", "note": "secret.txt", "other": "../outside.png"} for row in tickets(3)]
    await reviewed_run(tmp_path / "run", 3, inputs=rows)
    audit(tmp_path / "run", 3)
    async with served(tmp_path / "run") as address, reviewers(address, "ada") as [ada]:
        row = await ada.next()
        assert [(each["field"], each["name"]) for each in row["files"]] == [("photo", "photo.png")]
        status, data = await ada.ask("/api/review/file", row=str(row["row"]), number="0", who="ada")
        assert (status, data) == (200, PIXEL)
        for number, who in (("1", "ada"), ("0", "bob"), ("x", "ada")):
            status, _ = await ada.ask("/api/review/file", row=str(row["row"]), number=number, who=who)
            assert status == 400


async def begun(page: Page, address: str, name: str = "Ada") -> None:
    await page.goto(address)
    await page.until("document.querySelector('input[aria-label=\"your name\"]')")
    await page.ask(f"document.querySelector('input').value = {name!r}")
    await page.ask("document.querySelector('form').requestSubmit()")
    await page.until("document.querySelector('.given-row')")


@needs_chromium
async def test_a_person_reviews_with_the_keyboard_alone(tmp_path: Path) -> None:
    await reviewed_run(tmp_path / "run", 30)
    audit(tmp_path / "run", 3)
    async with served(tmp_path / "run") as address, chromium() as page:
        await begun(page, address)
        assert "token" not in await page.ask("location.href")
        seen = []
        for _ in range(3):
            name = await page.ask("document.querySelector('.given-row h2').innerText")
            assert CANARY not in await page.text()
            seen.append(name)
            await page.press("2")
            await page.until(f"!document.querySelector('.given-row h2').innerText.includes({name.split()[0]!r})")
        assert "REPAIR" in (await page.text()).upper()
        assert CANARY in await page.text()
        await page.press("u")
        await page.until(f"document.querySelector('.given-row h2').innerText === {seen[-1]!r}")
        await page.press("s")
        await page.until(f"document.querySelector('.given-row h2').innerText !== {seen[-1]!r}")
        assert not page.problems
        assert all(f"{URL(address).origin()}/" in each or each.startswith("data:") for each in page.requests)


@needs_chromium
async def test_edits_are_made_with_the_fields_of_the_schema(tmp_path: Path) -> None:
    await reviewed_run(tmp_path / "run", 9)
    async with served(tmp_path / "run") as address, chromium() as page:
        await begun(page, address)
        await page.press("Enter")
        await page.until("document.querySelector('.note').innerText.includes('no value yet')")
        await page.press("e")
        await page.until("document.querySelector('select[data-field=label]')")
        await page.ask("document.querySelector('select[data-field=label]').selectedIndex = 3")
        await page.ask("document.querySelector('textarea[data-field=why]').value = 'typed by hand'")
        await page.ask(
            "[...document.querySelectorAll('.acts button')].find((each) => each.innerText.includes('give')).click()"
        )
        await page.until("document.querySelector('.end')")
        said = [json.loads(line) for line in (tmp_path / "run" / "review.jsonl").read_text().splitlines()]
        assert said[-1]["output"] == {"label": "account", "why": "typed by hand"}
        assert not page.problems
