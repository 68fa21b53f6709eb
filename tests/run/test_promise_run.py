"""A run with a promise: how it is proved by people or by gold, what it costs, and what its record says after a kill."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.run.promised import MOODS, answer, doubting, judge, standing, table

from batch_agent import BatchAgent, Pipeline, Results
from batch_agent.errors import SpecError
from batch_agent.record.certificate import certificate_of, check
from batch_agent.record.people import PeopleReview
from batch_agent.run.promise import priced

pytestmark = pytest.mark.usefixtures("state")


async def run(rows: list[dict[str, Any]], place: Path, **options: Any) -> Results[Any]:
    known: dict[str, Any] = {"task": "{text}", "inputs": rows, "output_schema": MOODS, "max_retries": 0}
    known |= {"backend": doubting(answer), "run_dir": place, "on_change": None}
    if "gold" not in options:
        known["inputs"] = [{name: row[name] for name in ("id", "text")} for row in rows]
    return await BatchAgent.run(**{**known, "promise": "mood.accuracy >= 0.9", **options})


def events(place: Path, kind: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (place / "review.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == kind]


async def test_people_judge_random_rows_and_repair_doubted_ones_until_the_promise_is_kept(tmp_path: Path) -> None:
    rows = table(400, wrong=0.15)
    results = await run(rows, tmp_path / "run")
    before = results.summary.promise
    assert before is not None
    assert (before.state, before.next, before.judgements) == ("not yet", "audit", 0)
    assert before.truth == "people's blind answers"
    judged = judge(tmp_path / "run", rows)
    after = standing(tmp_path / "run")
    assert after.state == "kept", after
    assert after.judgements == judged < 300
    assert after.bound is not None
    assert after.bound <= 0.1
    assert (after.audit, after.repair, after.left) == (0, 0, None)
    [begun] = events(tmp_path / "run", "thresholds")
    assert 15 <= len(begun["output"]) <= 21  # equal quantiles are one


async def test_the_audit_takes_rows_in_the_order_of_the_key_and_freezes_answers_before_they_are_shown(
    tmp_path: Path,
) -> None:
    rows = table(300)
    await run(rows, tmp_path / "run")
    judge(tmp_path / "run", rows, most=60)
    head = [json.loads(line) for line in (tmp_path / "run" / "audit.jsonl").read_text().splitlines()]
    assert len(head) == 300
    answers = events(tmp_path / "run", "answer")
    assert [each["row"] for each in answers if each["queue"] == "audit"] == [index for index, _ in head][:60]
    frozen = {each["row"]: each["n"] for each in events(tmp_path / "run", "frozen")}
    assert all(frozen[each["row"]] < each["n"] for each in answers)
    facts = json.loads((tmp_path / "run" / "run.json").read_text())["promise"]
    assert facts["key"] != "batch-agent pilot"


async def test_what_was_decided_is_decided_again_from_the_record(tmp_path: Path) -> None:
    rows = table(300)
    await run(rows, tmp_path / "run")
    for more in (20, 21, 5):  # each time by another process, as after a kill
        judge(tmp_path / "run", rows, most=more)
        assert standing(tmp_path / "run") == standing(tmp_path / "run")
    assert len(events(tmp_path / "run", "thresholds")) == 1
    log = tmp_path / "run" / "review.jsonl"
    log.write_bytes(log.read_bytes() + b'{"n": 9999, "kind": "ans')  # a line that a kill cut short
    seen = standing(tmp_path / "run")
    judge(tmp_path / "run", rows, most=1)
    assert standing(tmp_path / "run").audited == seen.audited + 1


async def test_the_gold_of_a_pilot_that_nobody_looked_at_proves_a_promise_without_people(tmp_path: Path) -> None:
    rows = table(600, wrong=0.02)
    results = await run(rows, tmp_path / "run", gold={"mood": "truth"}, pilot=300)
    found = results.summary.promise
    assert found is not None
    assert (found.state, found.audited, found.judgements) == ("kept", 300, 0)
    assert found.truth == "the gold of the 300 rows of the pilot"
    assert results.summary.to_json()["promise"]["state"] == "kept"  # type: ignore[index, call-overload]
    other = await run(rows, tmp_path / "other", gold={"mood": "truth"}, pilot=300, task="Say: {text}")
    again = other.summary.promise
    assert again is not None
    assert again.state == "not yet", "the gold of the same rows has judged another prompt before"
    assert "looked at" in again.why


async def test_a_promise_by_gold_alone_that_the_pilot_does_not_show_is_impossible(tmp_path: Path) -> None:
    rows = table(400, wrong=0.2)
    results = await run(rows, tmp_path / "run", gold={"mood": "truth"}, pilot=100, truth="gold")
    found = results.summary.promise
    assert found is not None
    assert found.state == "impossible"
    assert "gold of the 100 rows of the pilot" in found.why


async def test_failed_rows_are_wrong_until_people_answer_them(tmp_path: Path) -> None:
    rows = table(300, wrong=0.01, failed=0.2)
    await run(rows, tmp_path / "run")
    with_failed = standing(tmp_path / "run")
    assert with_failed.coverage == pytest.approx(sum("fail" not in row["text"] for row in rows) / 300)
    judge(tmp_path / "run", rows)
    after = standing(tmp_path / "run")
    assert (after.state, after.coverage) == ("kept", 1.0)


async def test_a_promise_that_the_budget_of_people_cannot_keep_is_impossible(tmp_path: Path) -> None:
    rows = table(300)
    results = await run(rows, tmp_path / "run", max_people=10)
    found = results.summary.promise
    assert found is not None
    assert (found.state, found.next) == ("impossible", None)
    assert "max_people is reached" in found.why


async def test_the_price_of_people_is_part_of_what_is_left(tmp_path: Path) -> None:
    results = await run(table(300), tmp_path / "run", prices={"people": 0.25})
    found = results.summary.promise
    assert found is not None
    assert found.left is not None
    assert found.cost == (found.left[0] * 0.25, found.left[1] * 0.25)


async def test_another_prompt_is_proved_on_the_next_rows_of_the_order(tmp_path: Path) -> None:
    rows = table(400, wrong=0.03)
    await run(rows, tmp_path / "run")
    judge(tmp_path / "run", rows, most=40)
    await run(rows, tmp_path / "run", resume=True, on_change="resend", task="Say: {text}")
    found = standing(tmp_path / "run")
    assert found.audited == 0
    assert "the prompt, the model or the schema changed" in found.voided
    assert "its first 40 rows prove nothing" in found.voided
    assert found.voided in found.lines()
    judge(tmp_path / "run", rows, most=20)
    first, second = events(tmp_path / "run", "thresholds")
    assert (first.get("rows", 0), second["rows"]) == (0, 40)
    assert standing(tmp_path / "run").audited == 20


async def test_a_beacon_changes_the_rows_and_is_refused_once_the_audit_began(tmp_path: Path) -> None:
    rows = table(200)
    await run(rows, tmp_path / "one")
    await run(rows, tmp_path / "two", beacon="1,2,3")
    heads = [(tmp_path / name / "audit.jsonl").read_text() for name in ("one", "two")]
    assert heads[0] != heads[1]
    with pytest.raises(SpecError, match="beacon: the audit of this run has begun"):
        await run(rows, tmp_path / "two", beacon="4", resume=True)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"max_people": 5, "promise": None}, "max_people is about a promise"),
        ({"pilot": 5, "pilot_key": "x"}, "pilot_key and promise exclude each other"),
        ({"keep": "results", "processes": 2}, 'keep="results" and promise exclude each other'),
        ({"truth": "gold"}, 'truth="gold" needs gold and pilot'),
        ({"truth": "model"}, 'truth: must be "people", "gold", "last" or None'),
        ({"run_dir": None}, "promise needs a record"),
        ({"promise": "moot.accuracy >= 0.9"}, "has no field 'moot'"),
        ({"doubt": False}, "doubt=False and promise exclude each other"),
        ({"people_error": 1}, "people_error"),
    ],
)
async def test_options_that_exclude_a_promise_are_refused(options: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(SpecError) as refused:
        await run(table(5), tmp_path / "run", **options)
    assert said in str(refused.value)


async def test_a_pipeline_has_no_promise_and_the_refusal_says_what_to_do_instead(tmp_path: Path) -> None:
    pipeline = Pipeline(["calm 0.9"]).map(name="mood", task="{input}", output_schema=MOODS)
    how: dict[str, Any] = {"backend": "vllm://127.0.0.1:9", "model": "m", "run_dir": tmp_path / "run"}
    with pytest.raises(SpecError, match="run the pipeline without its last stage, write its results"):
        await pipeline.run(**how, promise="mood.accuracy >= 0.9")


async def test_an_iterator_has_no_audit(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="promise needs inputs that can be counted"):
        await run(table(5), tmp_path / "run", inputs=iter(table(5)))


async def test_another_promise_is_priced_by_the_audit_of_the_first(tmp_path: Path) -> None:
    rows = table(300, wrong=0.1)
    await run(rows, tmp_path / "run")
    judge(tmp_path / "run", rows)
    harder, easier = (priced(str(tmp_path / "run"), f"mood.accuracy >= {share}") for share in (0.97, 0.8))
    assert (harder.state, easier.state) == ("not yet", "kept")
    assert harder.left is not None
    assert harder.left[1] > 0
    assert standing(tmp_path / "run").state == "kept"


async def test_a_row_that_is_edited_begins_the_audit_again_and_keeps_the_judgements_of_the_others(
    tmp_path: Path,
) -> None:
    rows = table(150, wrong=0.05)
    await run(rows, tmp_path / "run")
    judge(tmp_path / "run", rows)
    kept = standing(tmp_path / "run")
    assert kept.state == "kept"
    first = events(tmp_path / "run", "answer")[0]["row"]
    rows[first] = {**rows[first], "text": f"{first}, edited: calm 0.900"}
    await run(rows, tmp_path / "run", resume=True, on_change="resend")
    void = standing(tmp_path / "run")
    assert void.state == "not yet"
    more = judge(tmp_path / "run", rows)
    again = standing(tmp_path / "run")
    assert again.state == "kept"
    assert 0 < more < again.judgements
    assert len(events(tmp_path / "run", "thresholds")) == 2
    assert "the rows or the promise changed" in again.voided
    certificate, _ = certificate_of(str(tmp_path / "run"))
    assert certificate is not None
    assert check(certificate, str(tmp_path / "run")) == ""


def say(place: Path, kind: str, *, rows: list[dict[str, Any]], who: str = "ann", given: Any = None) -> Any:
    """Let a person say something of the next row, and return the row."""
    with PeopleReview.open(str(place), overlap=1.0 if who != "ann" else 0.0) as review:
        shown = review.next(who)
        assert shown is not None
        truth = {row["id"]: row["truth"] for row in rows}[shown.row.id]
        output = {"mood": truth} if given is None else given(truth)
        row = shown.row
        review.judge(who, row.row, row.queue, kind, output if kind == "answer" else None, row.input)
        return row


async def test_a_skipped_row_is_waited_for_and_after_two_skips_it_is_wrong(tmp_path: Path) -> None:
    rows = table(200, wrong=0.0)
    await run(rows, tmp_path / "run")
    skipped = say(tmp_path / "run", "skip", rows=rows)
    for _ in range(5):
        say(tmp_path / "run", "answer", rows=rows)
    assert standing(tmp_path / "run").audited == 0, "the first row of the order is open"
    while say(tmp_path / "run", "skip", rows=rows, who="bob").row != skipped.row:
        pass
    assert standing(tmp_path / "run").audited == 6
    with PeopleReview.open(str(tmp_path / "run")) as review:
        assert review.promise is not None
        assert [wrong for _, wrong, _ in review.promise.audited()] == [True, *[False] * 5]


async def test_a_row_without_a_right_answer_is_wrong_and_out_of_coverage(tmp_path: Path) -> None:
    rows = table(200, wrong=0.0)
    await run(rows, tmp_path / "run")
    say(tmp_path / "run", "none", rows=rows)
    found = standing(tmp_path / "run")
    assert (found.audited, found.coverage) == (1, 199 / 200)
    assert found.bound is None or found.bound > 0.9


async def test_a_row_about_which_two_people_differ_is_wrong_until_a_third_decides(tmp_path: Path) -> None:
    rows = table(200, wrong=0.0)
    await run(rows, tmp_path / "run")
    first = say(tmp_path / "run", "answer", rows=rows)
    assert standing(tmp_path / "run").audited == 1

    def wrong(truth: str) -> dict[str, str]:
        return {"mood": "calm" if truth == "angry" else "angry"}

    assert say(tmp_path / "run", "answer", rows=rows, who="bob", given=wrong).row == first.row
    disputed = standing(tmp_path / "run")
    assert (disputed.audited, disputed.twice) == (1, 1)
    with PeopleReview.open(str(tmp_path / "run")) as review:
        assert review.promise is not None
        assert [wrong for _, wrong, _ in review.promise.audited()] == [True]
    assert say(tmp_path / "run", "answer", rows=rows, who="eve").row == first.row
    with PeopleReview.open(str(tmp_path / "run")) as review:
        assert review.promise is not None
        assert [wrong for _, wrong, _ in review.promise.audited()] == [False]


async def test_undone_judgements_are_computed_again(tmp_path: Path) -> None:
    rows = table(200, wrong=0.0)
    await run(rows, tmp_path / "run")
    for _ in range(3):
        say(tmp_path / "run", "answer", rows=rows)
    with PeopleReview.open(str(tmp_path / "run")) as review:
        review.undo("ann")
    assert standing(tmp_path / "run").audited == 2


async def test_the_promise_and_the_review_name_one_number_of_random_rows(tmp_path: Path) -> None:
    rows = table(400, wrong=0.15)
    await run(rows, tmp_path / "run")
    said = []
    for most in (0, 3, 25):
        judge(tmp_path / "run", rows, most=most, who="ann")
        with PeopleReview.open(str(tmp_path / "run")) as review:
            waits = review.left()["audit"].open
            said.append(waits)
            assert f"people judge {waits:,} more random rows, as far as is known now" in standing(tmp_path / "run").why
            assert f"{waits:,} wait ({waits:,} audit)" in review.lines()[0]
            assert review.next("bob") is not None  # one row is bob's, so the rows that ann judges next come after it
    assert len({*said}) == 3
