"""Takes screenshots of the page for docs/images: ``python docs/screenshots.py [FOLDER]``. Needs Chromium."""

from __future__ import annotations

import asyncio
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from tests.record.reviewed import reviewed_run  # noqa: E402
from tests.view.browser import Page, chromium  # noqa: E402
from tests.view.test_review_page import begun, served  # noqa: E402
from tests.view.test_view_server import page_of  # noqa: E402
from tests.view.world import recorded, rows, triage  # noqa: E402

from batch_agent import Pipeline  # noqa: E402
from batch_agent.record.people import PeopleReview  # noqa: E402
from batch_agent.testing import Say, ScriptedServer  # noqa: E402


@asynccontextmanager
async def showing(*paths: Path) -> AsyncIterator[Page]:
    async with page_of(*paths) as server, chromium() as page:
        await page.size(1280, 820)
        await page.goto(f"{server.base}/?token={server.token}")
        yield page


async def take(page: Page, place: str, ready: str, file: Path) -> None:
    await page.ask(f"location.hash = {place!r}")
    await page.until(ready)
    await asyncio.sleep(1.2)
    await page.picture(file)


async def live(folder: Path, place: Path) -> None:
    """Takes the screenshots of a run that is at work."""
    async with triage(place / "triage-live", 2000, pace=1.2, max_inflight=64) as run:

        async def drop() -> None:
            async for _ in run.results():
                pass

        taking = asyncio.create_task(drop())
        async with showing(place / "triage-live") as page:
            await asyncio.sleep(14)
            await take(page, "/run/triage-live", "document.querySelector('.does')", folder / "view-overview.png")
            await take(
                page, "/run/triage-live/control", "document.querySelector('.controls')", folder / "view-control.png"
            )
        run.cancel()
        await taking


async def pipeline(folder: Path, place: Path) -> None:
    """Takes the screenshot of a pipeline."""
    async with ScriptedServer(
        lambda request: Say(f"About this: {request.text[:60]}", latency=0.4), models=["triage-7b"]
    ) as server:
        stages = (
            Pipeline(rows(60))
            .map(name="sort", task="Sort ticket {id}: {text}")
            .filter(lambda text: len(str(text)) > 10)
            .map(name="answer", task="Answer: {input}")
            .reduce(name="report", prompt="What do these tickets have in common?")
        )
        await stages.run(backend=server.backend_url, model="triage-7b", run_dir=place / "mail")
    async with showing(place / "mail") as page:
        await take(page, "/run/mail", "document.querySelector('.stages')", folder / "view-pipeline.png")


async def over(folder: Path, place: Path) -> None:
    """Takes the screenshots of runs that have ended."""
    one = await recorded(place / "triage-7b", 400, pace=0.1)
    other = await recorded(place / "triage-32b", 400, pace=0.02, seed="b")
    async with showing(one, other) as page:
        await take(page, "/run/triage-7b/rows", "document.querySelector('tbody tr')", folder / "view-rows.png")
        await take(page, "/run/triage-7b/row/21", "document.querySelector('.call')", folder / "view-row.png")
        await take(page, "/run/triage-7b/timeline", "document.querySelector('canvas')", folder / "view-timeline.png")
        await take(
            page, "/compare/triage-7b/triage-32b", "document.querySelector('.difference')", folder / "view-compare.png"
        )
        await page.scheme("dark")
        await take(page, "/run/triage-7b", "document.querySelector('.tiles')", folder / "view-dark.png")
        await page.size(390, 844)
        await take(page, "/run/triage-7b/row/5", "document.querySelector('.call')", folder / "view-phone.png")


async def review(folder: Path, place: Path) -> None:
    """Takes the screenshot of an audit."""
    tickets = [{**row, "text": f"{row['text']} (ticket {number})"} for number, row in enumerate(rows(60))]
    await reviewed_run(place / "tickets", inputs=tickets, gold=None)
    with PeopleReview.open(place / "tickets") as audited:
        audited.audit(20, "lead")
    async with served(place / "tickets") as address, chromium() as page:
        await page.size(1280, 330)
        await begun(page, address)
        await asyncio.sleep(0.5)
        await page.picture(folder / "review-audit.png")


async def main(folder: Path) -> None:
    with tempfile.TemporaryDirectory() as place:
        await review(folder, Path(place))
        await over(folder, Path(place))
        await pipeline(folder, Path(place))
        await live(folder, Path(place))


if __name__ == "__main__":
    images = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs" / "images"
    images.mkdir(parents=True, exist_ok=True)
    asyncio.run(main(images))
