"""The review of a recorded run: what people see, give and get delivered."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import pytest
from tests.record.reviewed import CANARY, LABELS, reviewed_run, tickets, truth

from batch_agent import BatchAgent, Pipeline
from batch_agent.errors import SpecError, StoreError
from batch_agent.files.results import to_json
from batch_agent.record.people import PEOPLE, PeopleReview, Refusal, Shown, review_gold
from batch_agent.record.review import REVIEW
from batch_agent.testing import Fail, Say, ScriptedServer
from batch_agent.trust.review import AUDIT, REPAIR

pytestmark = pytest.mark.usefixtures("state")


def opened(place: Path | str, **options: Any) -> PeopleReview:
    return PeopleReview.open(str(place), **options)


def everything(shown: Shown) -> str:
    """All that a person gets of a row."""
    files = [each.to_json() for each in shown.files]
    return to_json([shown.row, shown.value, files, shown.model, shown.until]).decode()


def number(shown: Shown) -> int:
    return int(shown.row.id.removeprefix("T-"))


def judge(review: PeopleReview, shown: Shown, who: str, label: str | None = None) -> None:
    given: dict[str, Any] = {"label": label or truth(number(shown))}
    review.judge(who, shown.row.row, shown.row.queue, "answer", given, shown.row.input)


async def test_the_audit_shows_nothing_of_the_models_answer(place: str) -> None:
    await reviewed_run(place)
    with opened(place, overlap=0.0) as review:
        review.audit(12, "ada")
        seen = set()
        while (shown := review.next("ada", AUDIT)) is not None:
            assert CANARY not in everything(shown)
            assert "gold" not in everything(shown)
            assert shown.model is None
            seen.add(shown.row.id)
            judge(review, shown, "ada")
        assert len(seen) == 12
        left = review.left("ada")[AUDIT]
        assert (left.open, left.judged) == (0, 12)


async def test_failed_rows_are_repaired_and_what_failed_is_shown(place: str) -> None:
    await reviewed_run(place)
    with opened(place) as review:
        assert [row.id for row in review.queue(REPAIR)] == ["T-3", "T-10", "T-17", "T-24"]
        shown = review.next("ada", REPAIR)
        assert shown is not None
        assert shown.model is not None
        assert CANARY in str(shown.model["error"])
        with pytest.raises(Refusal, match="why"):  # the model has no answer whose other fields could stay
            judge(review, shown, "ada")
        review.judge("ada", shown.row.row, REPAIR, "answer", {"label": "billing", "why": "it says so"})
        assert review.waiting == 3


async def test_rows_that_no_entry_of_a_cascade_could_answer_are_repaired_with_all_their_failures_shown(
    place: str,
) -> None:
    def large(request: Any) -> Any:
        return Fail(400, "too odd") if "ticket 3" in str(request.body) else Say('{"label": "account", "why": "x"}')

    async with ScriptedServer(large) as server:
        later = {"backend": server.backend_url, "model": "large"}
        async with ScriptedServer(
            lambda request: Say("no json") if "ticket 3" in str(request.body) else large(request)
        ) as small:
            entries = [{"backend": small.backend_url, "model": "small"}, later, "people"]
            await reviewed_run(place, 5, backend=None, model=None, cascade=entries, max_retries=0)
    with opened(place) as review:
        assert [row.id for row in review.queue()] == ["T-3"]
        shown = review.next("ada")
        assert shown is not None
        assert shown.model is not None
        assert "too odd" in str(shown.model["error"])
        [earlier] = cast(list[Any], shown.model["earlier"])
        assert (earlier["name"], earlier["error"]["type"]) == ("small", "NotJSON")
        assert not review.models_have_work
        [failed] = [row for row in review.run.rows if not row["ok"]]
        assert (failed["escalated"], failed["waits_for"]) == (True, "people")


async def test_peoples_answers_are_delivered_and_the_models_stay(place: str) -> None:
    await reviewed_run(place)
    with opened(place, overlap=0.0) as review:
        before = [*review.run.rows]
        review.audit(30, "ada")
        while (shown := review.next("ada", AUDIT)) is not None:
            if shown.row.id == "T-4":
                review.judge("ada", shown.row.row, AUDIT, "none")
            else:
                judge(review, shown, "ada")
        delivered = {str(each["job_id"]): review.delivered(each) for each in before}
        assert [*review.run.rows] == before
        for row in range(30):
            each = delivered[f"T-{row}"]
            assert each["answered_by"] == PEOPLE
            if row == 4:
                assert (each["ok"], each["output"]) == (False, None)
                assert cast("dict[str, Any]", each["error"])["type"] == "NoRightAnswer"
                continue
            output, model = cast("dict[str, Any]", each["output"]), cast("dict[str, Any] | None", each["model"])
            assert output["label"] == truth(row)
            assert (model is None) == (row % 7 == 3)
            if model is not None:
                assert output["why"] == model["why"], "a field that people left open is that of the model"
        # A failed row of which people said only the label lacks the other field: it waits for a repair.
        assert {row.id for row in review.queue(REPAIR)} == {"T-3", "T-10", "T-17", "T-24"}


async def test_two_reviewers_in_two_processes_never_get_the_same_row(place: str) -> None:
    await reviewed_run(place)
    with opened(place, overlap=0.0) as one, opened(place, overlap=0.0) as other:
        one.audit(10, "ada")
        rows = []
        for who, review in (("ada", one), ("bob", other)) * 5:
            shown = review.next(who, AUDIT)
            assert shown is not None
            rows.append(shown.row.id)
            judge(review, shown, who)
        assert len({*rows}) == 10
        assert one.next("ada", AUDIT) is None


async def test_rows_for_two_show_how_well_people_agree(place: str) -> None:
    await reviewed_run(place, overlap=1.0)
    with opened(place) as review:
        review.audit(10, "ada")
        for who in ("ada", "bob"):
            for turn in range(10):
                shown = review.next(who, AUDIT)
                assert shown is not None
                label = LABELS[(number(shown) + (who == "bob" and turn == 4)) % 3]
                judge(review, shown, who, label)
        agreement = review.review.agreement(AUDIT)
        assert agreement is not None
        assert (agreement.right, agreement.rows) == (9, 10)
        assert review.waiting == 1 + 4  # a third decides about one row, and four failed rows are to be repaired
        assert review.next("ada", AUDIT) is None
        assert review.next("eve", AUDIT) is not None


async def test_a_lease_ends_after_its_time(place: str) -> None:
    await reviewed_run(place, review_lease=1e-6)
    with opened(place) as review:
        assert review.lease == 1e-6
        one, other = review.next("ada", REPAIR), review.next("bob", REPAIR)
        assert one is not None
        assert other is not None
        assert one.row == other.row


async def test_undo_gives_the_row_back(place: str) -> None:
    await reviewed_run(place)
    with opened(place) as review:
        review.audit(3, "ada")
        shown = review.next("ada")
        assert shown is not None
        judge(review, shown, "ada")
        back = review.undo("ada")
        assert back is not None
        assert back.row == shown.row
        assert CANARY not in everything(back)
        assert review.left()[AUDIT].open == 3
        with pytest.raises(Refusal, match="nothing of yours"):
            review.undo("bob")


async def test_a_blind_judgement_stays_after_its_person_has_seen_what_the_models_said(tmp_path: Path) -> None:
    await reviewed_run(tmp_path / "run", 4)  # the row T-3 failed
    with opened(tmp_path / "run", overlap=0.0) as review:
        review.audit(4, "ada")
        while (shown := review.next("ada", AUDIT)) is not None:
            judge(review, shown, "ada")
            if shown.row.id == "T-3":
                again = review.undo("ada")
                assert again is not None
                assert again.model is None
                judge(review, again, "ada")
        while (undone := review.review.last_of("ada")) is not None and undone.id != "T-3":
            review.undo("ada")
        repair = review.next("ada", REPAIR)
        assert repair is not None
        assert repair.row.id == "T-3"  # its people's answer lacks a field
        with pytest.raises(Refusal, match="your blind judgement of it stays"):
            review.undo("ada")
        assert review.review.verdict(3, AUDIT).kind == "answer"


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"label": "biling"}, "it is not one of billing, shipping, account"),
        ({}, "label has no value"),
        ({"label": None}, "label has no value"),
        ({"label": "billing", "mood": 1}, "no field 'mood'"),
        ("billing", "an answer has the fields label, why"),
    ],
)
async def test_an_answer_that_does_not_fit_is_refused(tmp_path: Path, given: Any, why: str) -> None:
    await reviewed_run(tmp_path / "run", 9)
    with opened(tmp_path / "run") as review:
        review.audit(3, "ada")
        shown = review.next("ada", AUDIT)
        assert shown is not None
        with pytest.raises(Refusal, match=why):
            review.judge("ada", shown.row.row, AUDIT, "answer", given)
        assert review.left()[AUDIT].open == 3


@pytest.mark.parametrize("name", ["", "  ", "a\x1b[31m", "x" * 81, 7, None])
async def test_a_name_that_is_none_is_refused(tmp_path: Path, name: Any) -> None:
    await reviewed_run(tmp_path / "run", 9)
    with opened(tmp_path / "run") as review, pytest.raises(Refusal, match="a name of"):
        review.next(name)


async def test_an_edited_row_and_another_schema_void_what_people_said(tmp_path: Path) -> None:
    run = tmp_path / "run"
    await reviewed_run(run, 9)
    with opened(run, overlap=0.0) as review:
        review.audit(9, "ada")
        while (shown := review.next("ada", AUDIT)) is not None:
            judge(review, shown, "ada")
    edited = [{name: row[name] for name in ("id", "text")} for row in tickets(9)]
    edited[2]["text"] = "ticket 2, and more"
    schema = {"type": "object", "properties": {"label": {"type": "string", "enum": ["shipping", "account"]}}}
    fewer = {**schema, "required": ["label"]}
    await reviewed_run(run, 9, lambda _: Say('{"label": "account"}'), inputs=edited, output_schema=fewer,
                       gold=None, resume=True, on_change="resend")  # fmt: skip
    with opened(run, overlap=0.0) as review:
        left = review.left()[AUDIT]
        assert review.review.outdated == 3, "billing is no answer any more"
        assert left.open == 3 + 1
        assert review.voided == 1


async def test_a_finished_audit_is_gold_for_the_next_prompt(place: str) -> None:
    await reviewed_run(place, gold=None, inputs=[{"id": f"T-{row}", "text": f"ticket {row}"} for row in range(30)])
    with opened(place, overlap=0.0) as review:
        with pytest.raises(SpecError, match="has no audit"):
            review_gold(review)
        review.audit(10, "ada")
        with pytest.raises(SpecError, match="is not finished, 10 of 10 rows wait: batch-agent review"):
            review_gold(review)
        while (shown := review.next("ada", AUDIT)) is not None:
            judge(review, shown, "ada")
        gold = review_gold(review)
    assert len(gold) == 10
    assert all(values == {"label": truth(int(name.removeprefix("T-")))} for name, values in gold.items())


async def test_in_a_running_run_rows_wait_for_people_as_soon_as_they_have_failed(tmp_path: Path) -> None:
    run = tmp_path / "run"
    async with ScriptedServer(lambda request: Say("no JSON at all")) as server:
        options: dict[str, Any] = {"backend": server.backend_url, "model": "small", "run_dir": run}
        rows = [{"id": f"T-{row}", "text": f"ticket {row}"} for row in range(3)]
        async with BatchAgent.open(task="{text}", inputs=rows, output_schema={"label": "a|b"}, **options) as working:
            async for _ in working.results():
                break
            with opened(run) as review:
                assert len(review.queue(REPAIR)) >= 1
                shown = review.next("ada")
                assert shown is not None
                review.judge("ada", shown.row.row, REPAIR, "answer", {"label": "a"})
            async for _ in working.results():
                pass
    with opened(run) as review:
        assert review.waiting == 2
        assert len((run / REVIEW).read_text().splitlines()) == 2
        assert json.loads((run / REVIEW).read_text().splitlines()[1])["who"] == "ada"


async def test_a_review_says_when_the_models_have_work(tmp_path: Path) -> None:
    def says(request: Any) -> Any:
        return Fail(503, "away") if "ticket 2" in str(request.body) else Say('{"label": "billing", "why": "x"}')

    await reviewed_run(tmp_path / "run", 6, says, max_retries=0, gold=None)
    with opened(tmp_path / "run") as review:
        assert review.queue() == [], "a server that was away is no work for people"
        assert review.models_have_work
    await reviewed_run(tmp_path / "run", 6, gold=None, resume=True)
    with opened(tmp_path / "run") as review:
        assert not review.models_have_work


async def test_an_answer_counts_though_the_models_have_answered_the_row_meanwhile(tmp_path: Path) -> None:
    await reviewed_run(tmp_path / "run", 6, gold=None)
    with opened(tmp_path / "run") as review:
        shown = review.next("ada")
        assert shown is not None
        assert shown.row.id == "T-3"
        answers = lambda _: Say('{"label": "account", "why": "x"}')  # noqa: E731
        await reviewed_run(tmp_path / "run", 6, answers, gold=None, resume=True, retry_failed=True)
        review.catch_up()
        assert review.queue() == []
        review.judge("ada", shown.row.row, REPAIR, "answer", {"label": "billing"}, shown.row.input)
        [record] = [each for each in review.run.rows if each["job_id"] == "T-3"]
        assert review.delivered(record)["output"] == {"label": "billing", "why": "x"}


async def test_the_answers_of_a_pipelines_last_stage_are_reviewed(place: str) -> None:
    def says(request: Any) -> Say:
        return Say('{"label": "a"}') if "Label" in str(request.body) else Say("a summary")

    async with ScriptedServer(says) as model:
        inputs = [{"id": f"T-{row}", "text": f"ticket {row}"} for row in range(6)]
        first = Pipeline(inputs).map(name="sum", task="Sum up {text}")
        pipeline = first.map(name="label", task="Label {input}", output_schema={"label": "a|b"})
        await pipeline.run(backend=model.backend_url, model="small", run_dir=place)
    with opened(place, overlap=0.0) as review:
        review.audit(3, "ada")
        while (shown := review.next("ada")) is not None:
            review.judge("ada", shown.row.row, AUDIT, "answer", {"label": "b"})
        delivered = [review.delivered(each) for each in review.run.rows]
    with opened(place, stage="sum") as first_stage:
        assert first_stage.form.whole
        assert not first_stage.begun
    with pytest.raises(SpecError, match="has no stage 'other'"):
        opened(place, stage="other")
    assert sum(each["output"] == {"label": "b"} for each in delivered) == 3
    assert all(each["model"] == {"label": "a"} for each in delivered)
    if not place.startswith("redis"):
        assert Path(place, "label", REVIEW).exists()
        assert not Path(place, REVIEW).exists()


async def test_a_promise_about_one_field_asks_for_that_field_alone(tmp_path: Path) -> None:
    schema = {"type": "object", "properties": {"label": {"enum": LABELS}, "urgent": {"type": "boolean"}}}
    async with ScriptedServer(
        lambda _: Say(
            '{"label": "billing", "urgent": true}',
        )
    ) as server:
        options: dict[str, Any] = {"backend": server.backend_url, "model": "small", "samples": 3, "temperature": 1.0}
        rows = [{"id": f"T-{row}", "text": f"ticket {row}"} for row in range(40)]
        await BatchAgent.run(task="{text}", inputs=rows, output_schema={**schema, "required": ["label", "urgent"]},
                             promise="label.accuracy >= 0.8", run_dir=tmp_path / "run", **options)  # fmt: skip
    with opened(tmp_path / "run", overlap=0.0) as review:
        with pytest.raises(SpecError, match="the promise of this run says which rows are audited"):
            review.audit(3, "ada")
        shown = review.next("ada")
        assert shown is not None
        assert shown.row.queue == AUDIT
        assert "billing" not in everything(shown)
        review.judge("ada", shown.row.row, AUDIT, "answer", {"label": "billing"})


async def test_on_a_full_disk_the_reason_is_said_and_the_row_stays(tmp_path: Path) -> None:
    resource, signal = pytest.importorskip("resource"), pytest.importorskip("signal")
    await reviewed_run(tmp_path / "run", 9)
    with opened(tmp_path / "run", overlap=0.0) as review:
        review.audit(3, "ada")
        shown = review.next("ada")
        assert shown is not None
        full = (tmp_path / "run" / REVIEW).stat().st_size + 20
        limits, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.getsignal(signal.SIGXFSZ)
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (full, limits[1]))
        try:
            with pytest.raises(StoreError, match="This answer is not recorded; earlier ones are"):
                judge(review, shown, "ada")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
            signal.signal(signal.SIGXFSZ, handler)
        assert review.left()[AUDIT].open == 3
        judge(review, shown, "ada")
        assert review.left()[AUDIT].open == 2
    with opened(tmp_path / "run", overlap=0.0) as review:
        assert review.left()[AUDIT].open == 2
