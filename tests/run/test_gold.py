"""Gold in a run: taken out of the rows before anything sees them, and compared with the answers in every shape."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel
from tests.record.redis_servers import SERVER
from tests.run.process_work import WarmCrew

import batch_agent
from batch_agent import AgentContext, BatchAgent, Pipeline, Results
from batch_agent.errors import SpecError
from batch_agent.job import AgentResult
from batch_agent.record.reader import open_run
from batch_agent.record.redis.reading import RedisReader
from batch_agent.record.score_reader import score_of_run
from batch_agent.testing import Fail, Request, Say, ScriptedBackend, ScriptedServer
from batch_agent.trust.intervals import clopper_pearson, finite

CANARY = "canary-7f3a"
MOODS = {"mood": "angry|calm|canary-7f3a"}


pytestmark = pytest.mark.usefixtures("state")


def rows(count: int = 20) -> list[dict[str, Any]]:
    """Rows of which every fourth gets a wrong answer."""
    return [{"id": f"r{row}", "text": f"text {row}", "label": "calm" if row % 4 else "angry"} for row in range(count)]


def calm(request: Request) -> Say | Fail:
    return Say('{"mood": "calm"}')


def moody(**options: Any) -> dict[str, Any]:
    backend = options.pop("backend", None) or ScriptedBackend(calm)
    known = {"task": "Mood of {text}", "output_schema": MOODS, "backend": backend, "inputs": rows(), "gold": "label"}
    return {**known, **options}


async def scored(**options: Any) -> Results[Any]:
    return await BatchAgent.run(**moody(**options))


async def test_a_run_with_gold_is_scored() -> None:
    results = await scored()
    score = results.score()
    assert (score["mood"].rows, score["mood"].right, score["mood"].accuracy) == (20, 15, 0.75)
    assert score["mood"].interval == pytest.approx(clopper_pearson(15, 20))
    assert score.sample == "rows that you chose: nothing follows for the others"
    assert score.pending == 0
    assert all("label" not in result.input for result in results)  # type: ignore[operator]


async def test_gold_of_several_fields_is_given_by_column() -> None:
    schema = {"mood": "angry|calm", "address": {"city": "text"}}
    backend = ScriptedBackend(lambda _: Say('{"mood": "calm", "address": {"city": " new  YORK"}}'))
    inputs = [{"text": "a", "label": "calm", "town": "New York"}, {"text": "b", "label": "", "town": "Oslo"}]
    gold = {"mood": "label", "address.city": "town"}
    score = (await scored(output_schema=schema, backend=backend, inputs=inputs, gold=gold)).score()
    assert (score["mood"].rows, score["mood"].right) == (1, 1)
    assert (score["address.city"].rows, score["address.city"].right) == (2, 1)
    assert (score.all.rows, score.all.right) == (2, 1)


async def test_a_gold_file_is_joined_by_id(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "gold.csv"
    path.write_text("id,mood\nr0,angry\nr1,calm\nr2,\nnobody,calm\n")
    inputs = [{"id": row["id"], "text": row["text"]} for row in rows()]
    results = await scored(inputs=inputs, gold=str(path))
    assert (results.score()["mood"].rows, results.score()["mood"].right) == (2, 1)
    assert "1 of 3 ids" in caplog.text


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"gold": "lable"}, "no row has the column 'lable'"),
        ({"gold": {"mod": "label"}}, "no field 'mod'.*mood"),
        ({"inputs": [{"text": "a", "label": "mild"}, {"text": "b", "label": "calm"}]}, "row 0: label is 'mild'.*angry"),
        ({"inputs": [{"text": "a", "label": ""}]}, "no row has a value in label"),
        ({"task": "{text} is {label}"}, "label.*column of gold"),
        ({"task": "{{ label }}", "template": "jinja"}, "label.*column of gold"),
        ({"id_column": "label"}, "id_column names 'label'"),
        ({"affinity": "label"}, "affinity names 'label'"),
        ({"images": ["label"]}, "images names 'label'"),
        ({"by": "label"}, "column of gold"),
        ({"by": "language"}, "by: the rows have no column 'language'"),
        ({"require": "mood.acuracy >= 0.9"}, "did you mean 'accuracy'"),
        ({"require": "mood.macro_f1 >= 0.9"}, "approximate"),
        ({"tolerance": {"mood": 1}}, "not a number"),
        ({"score": {"mood": "no_such_module:f"}}, "cannot be imported"),
        ({"gold": None, "by": "text"}, "there is no gold"),
        ({"gold": "missing.csv"}, "cannot read missing.csv"),
    ],
)
async def test_what_cannot_be_scored_is_refused_before_anything_is_sent(options: dict[str, Any], why: str) -> None:
    backend = ScriptedBackend(calm)
    with pytest.raises(SpecError, match=why):
        await scored(backend=backend, **options)
    assert not backend.requests


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("id,mood\nr0,calm\nr0,angry\n", "r0: this id is in the file twice"),
        ("id,mood\nx0,calm\n", "no row has an id of"),
        ("id,mood\nr0,mild\n", "row r0: mood is 'mild'"),
        ("name,mood\nr0,calm\n", "needs a column 'id'"),
        ("id,mod\nr0,calm\n", "mod"),
    ],
)
async def test_a_gold_file_that_cannot_be_used_is_refused(tmp_path: Path, text: str, why: str) -> None:
    path, backend = tmp_path / "gold.csv", ScriptedBackend(calm)
    path.write_text(text)
    with pytest.raises(SpecError, match=why):
        await scored(backend=backend, gold=path)
    assert not backend.requests


class Ticket(BaseModel):
    text: str
    label: str


@dataclass
class Note:
    text: str
    label: str


class Again:
    """Rows that can be read again, and whose number is not known."""

    def __init__(self, made: list[dict[str, str]]) -> None:
        self.made = made

    def __iter__(self) -> Iterator[dict[str, str]]:
        return iter(self.made)


def canaries(shape: str, tmp_path: Path) -> Any:
    made = [{"text": f"text {row}", "label": CANARY} for row in range(3)]
    if shape == "iterable":
        return Again(made)
    if shape == "frame":
        return pytest.importorskip("pandas").DataFrame(made)
    if shape == "models":
        return [Ticket(**row) for row in made]
    if shape == "dataclasses":
        return [Note(**row) for row in made]
    if shape == "iterator":
        return iter(made)
    if shape == "async iterator":

        async def each() -> AsyncIterator[dict[str, str]]:
            for row in made:
                yield row

        return each()
    if shape == "file":
        (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, made)))
        return tmp_path / "rows.jsonl"
    return made


@pytest.mark.parametrize(
    "shape", ["list", "models", "dataclasses", "iterator", "async iterator", "file", "iterable", "frame"]
)
@pytest.mark.parametrize("task", ["{text}", "{{ row }} {{ text }}"])
async def test_nothing_that_the_run_sees_has_the_gold(tmp_path: Path, shape: str, task: str) -> None:
    backend, told = ScriptedBackend(calm), list[AgentResult[Any]]()
    options = {"backend": backend, "inputs": canaries(shape, tmp_path), "on_result": told.append, "task": task}
    template = "jinja" if "row" in task else "braces"
    results = await scored(**options, template=template, run_dir=tmp_path / "run")
    assert results.score()["mood"].rows == 3
    assert len(backend.requests) == 3
    for request in backend.requests:
        assert CANARY not in repr(request.messages)
    assert CANARY not in repr(told)
    for file in ("run.json", "results.jsonl", "journal.db", "timeline.jsonl"):
        found = (tmp_path / "run" / file).read_bytes()
        assert found.count(CANARY.encode()) <= (5 if file != "results.jsonl" else 0), file  # the schema has it


async def test_a_worker_does_not_see_the_gold() -> None:
    seen = []

    async def work(row: dict[str, Any], ctx: Any) -> dict[str, str]:
        seen.append(dict(row))
        return {"mood": "calm"}

    results = await BatchAgent.run(
        worker=work, inputs=rows(), gold={"mood": "label"}, backend=ScriptedBackend(calm), max_agents=4
    )
    assert len(seen) == 20
    assert not any("label" in row for row in seen)
    score = results.score()
    assert (score["mood"].right, score["mood"].rows) == (15, 20)
    assert any("schema of the answers is not known" in note for note in score.notes)


@pytest.mark.parametrize("kind", ["list", "file"])
@pytest.mark.parametrize("task", ["Mood of {text}", "{{ row }} {{ text }}", "worker"])
async def test_adding_gold_to_a_finished_run_asks_nothing_again(tmp_path: Path, task: str, kind: str) -> None:
    calls = []

    async def work(row: dict[str, Any], ctx: Any) -> dict[str, str]:
        calls.append(row)
        return json.loads((await ctx.ask(str(row["text"]))).text)  # type: ignore[no-any-return]

    inputs: Any = rows()
    if kind == "file":
        inputs = tmp_path / "rows.jsonl"
        inputs.write_text("\n".join(map(json.dumps, rows())))
    options = {"task": task, "template": "jinja" if "row" in task else "braces", "inputs": inputs}
    if task == "worker":
        options |= {"worker": work, "task": "", "template": "braces"}
    first, again = ScriptedBackend(calm), ScriptedBackend(calm)
    await scored(backend=first, gold=None, run_dir=tmp_path / "run", **options)
    asked, called = len(first.requests), len(calls)
    assert asked == 20
    for _ in range(2):
        results = await scored(backend=again, run_dir=tmp_path / "run", resume=True, **options)
        assert not again.requests
        assert results.score()["mood"].right == 15
        with open_run(str(tmp_path / "run")) as record:
            scores = [results.score(), score_of_run(record, {})]
        # The first session had no gold to take out, and a task or a worker may have used the whole row.
        saw = task != "Mood of {text}"
        assert [any("saw the columns of gold" in note for note in score.notes) for score in scores] == [saw] * 2
    assert len(calls) == called


async def test_results_of_a_run_without_gold_are_scored_by_a_column_of_their_inputs() -> None:
    results = await scored(gold=None)
    assert results.score("label")["mood"].right == 15
    with pytest.raises(SpecError, match="no gold"):
        results.score()


async def test_gold_of_a_schema_with_limits_is_checked_and_scored() -> None:
    limits = {"type": "integer", "minimum": 1, "maximum": 5}
    schema = {"type": "object", "properties": {"stars": limits}, "required": ["stars"]}
    inputs = [{"text": "a", "label": "3"}, {"text": "b", "label": "4"}]
    backend = ScriptedBackend(lambda _: Say('{"stars": 3}'))
    results = await scored(output_schema=schema, inputs=inputs, backend=backend)
    assert [results.score()["stars"].right for _ in range(2)] == [1, 1]
    with pytest.raises(SpecError, match="row 1: label is '6'"):
        await scored(output_schema=schema, inputs=[inputs[0], {"text": "b", "label": "6"}], backend=backend)


async def test_without_a_schema_a_column_is_that_of_the_only_field_of_the_answers() -> None:
    async def work(row: dict[str, str], ctx: AgentContext) -> dict[str, str]:
        return {"mood": "calm"}

    async def talk(row: dict[str, str], ctx: AgentContext) -> dict[str, str]:
        return {"mood": "calm", "why": "so"}

    known = {"inputs": rows(), "backend": ScriptedBackend(calm)}
    results = await BatchAgent.run(worker=work, **known)
    assert results.score("label")["mood"].right == 15
    results = await BatchAgent.run(worker=talk, **known)
    with pytest.raises(SpecError, match=r"2 fields \(mood, why\).*say which column"):
        results.score("label")
    assert results.score({"mood": "label"})["mood"].right == 15


async def test_failed_rows_are_wrong_and_unfinished_ones_pending() -> None:
    def script(request: Request) -> Say | Fail:
        return Fail(400) if "text 1" in str(request.messages[-1]["content"]) else Say('{"mood": "calm"}')

    score = (await scored(backend=ScriptedBackend(script))).score()["mood"]
    assert score.rows == 20
    assert score.coverage.value == pytest.approx(9 / 20)
    assert score.confusion is not None
    assert sum(row.get("(failed)", 0) for row in score.confusion.values()) == 11

    async with BatchAgent.open(**moody(max_inflight=1, max_agents=1)) as run:
        taken = 0
        async for _ in run.results():
            taken += 1
            if taken == 5:
                run.drain()
        found = run.score()
    assert found.all.rows + found.pending == 20
    assert found.pending > 0
    assert found["mood"].interval == pytest.approx(clopper_pearson(found["mood"].right, 20))


async def test_a_random_sample_is_of_the_table_and_gold_on_all_rows_counts_it() -> None:
    inputs = [{**row, "label": row["label"] if number < 8 else ""} for number, row in enumerate(rows())]
    score = (await scored(inputs=inputs, gold_sample="random")).score()
    assert score.sample == "a random sample of the table"
    assert score.population == 20
    assert score["mood"].interval == pytest.approx(finite(6, 8, 20))
    counted = (await scored(gold_sample="random")).score()
    assert counted["mood"].interval == (0.75, 0.75)


async def test_looks_are_counted_once_for_each_prompt(tmp_path: Path, state: Path) -> None:
    first = await scored(gold_sample="random")
    assert first.score().looks == 0
    assert first.score().looks == 0
    second = await scored(gold_sample="random", task="Other words: {text}", run_dir=tmp_path / "run")
    assert second.score().looks == 1
    assert first.score().looks == 0
    third = await scored(task="Third: {text}", inputs=rows()[::-1])
    assert third.score().looks == 2
    assert (await scored(inputs=rows(10))).score().looks == 0  # other gold
    ledger = state / "looks.jsonl"
    assert ledger.stat().st_mode & 0o777 == 0o600
    assert b'"asked"' in (tmp_path / "run" / "looks.jsonl").read_bytes()


async def test_sealed_gold_is_not_scored_until_it_is_opened() -> None:
    inputs = rows(100)
    results = await scored(inputs=inputs, gold_sealed=True, gold_sample="random")
    open_half, sealed = results.score(), results.score(open_sealed=True)
    assert open_half.all.rows + sealed.all.rows == 100
    assert 30 < open_half.all.rows < 70
    assert open_half.sealed == sealed.all.rows
    assert open_half.sample == sealed.sample == "a random sample of the table"


async def test_what_is_required_is_in_the_score() -> None:
    score = (await scored(require=["mood.accuracy >= 0.9", "coverage >= 0.8"])).score()
    assert len(score.unmet) == 1
    assert "0.75 measured (15 of 20), at least" in score.unmet[0]


def pair(answer: Any, gold: Any) -> bool:
    return {answer, gold} <= {"calm", "angry"}


async def test_a_function_decides_what_is_right_and_its_error_does_not_end_the_run() -> None:
    assert (await scored(score={"mood": pair})).score()["mood"].right == 20
    assert (await scored(score={"mood": f"{__name__}:pair"})).score()["mood"].right == 20
    results = await scored(score={"mood": lambda answer, gold: 1 / 0})
    assert len(results.ok) == 20
    with pytest.raises(SpecError, match="ZeroDivisionError"):
        results.score()


async def test_the_score_is_also_given_by_column_and_by_groups() -> None:
    inputs = [{**row, "language": ["de", "en"][number % 2]} for number, row in enumerate(rows())]
    score = (await scored(inputs=inputs, by="language", groups="language")).score()
    assert score.by is not None
    assert {value: fields["mood"].right for value, fields in score.by.items()} == {"de": 5, "en": 10}
    assert score["mood"].interval is None


async def test_an_iterator_with_wrong_gold_fails_at_that_row() -> None:
    def each() -> Iterator[dict[str, str]]:
        yield {"text": "a", "label": "calm"}
        yield {"text": "b", "label": "mild"}

    with pytest.raises(SpecError, match="row 1: label is 'mild'"):
        await scored(inputs=each())


async def test_the_last_stage_of_a_pipeline_is_scored() -> None:
    backend = ScriptedBackend(lambda request: Say("short") if "Sum" in str(request.messages) else calm(request))
    made = Pipeline(rows()).map(name="sum", task="Sum up {text}").filter(lambda text: True)
    pipeline = made.map(name="mood", task="Mood of {input}", output_schema=MOODS)
    outcome = await pipeline.run(backend=backend, gold="label", require="accuracy >= 0.1")
    score = outcome.results["mood"].score()
    assert (score["mood"].right, score["mood"].rows, score.unmet) == (15, 20, [])
    assert outcome.score(wrong=True)["mood"] == score["mood"]
    assert not any("label" in repr(request.messages) for request in backend.requests)
    with pytest.raises(SpecError, match="one answer of all rows"):
        await made.reduce("All: {n}").run(backend=backend, gold="label")
    with pytest.raises(SpecError, match="carry names 'label'"):
        await Pipeline(rows()).map(task="{text}", carry=["label"]).run(backend=backend, gold="label")


async def test_a_row_that_failed_in_an_earlier_stage_is_wrong_and_columns_are_those_of_the_inputs(
    tmp_path: Path,
) -> None:
    def script(request: Request) -> Say | Fail:
        if request.text in ("Sum up text 1", "Sum up text 2"):
            return Fail(400)
        return Say("drop" if request.text == "Sum up text 3" else '{"mood": "calm"}')

    inputs = [{**row, "half": "ab"[number // 10]} for number, row in enumerate(rows())]
    made = Pipeline(inputs).map(name="sum", task="Sum up {text}").filter(lambda text: text != "drop")
    pipeline = made.map(name="mood", task="Mood of {input}", output_schema=MOODS)
    options = {"gold": "label", "by": "half", "max_retries": 0, "run_dir": tmp_path / "run"}
    outcome = await pipeline.run(backend=ScriptedBackend(script), **options)
    with open_run(str(tmp_path / "run")) as run:
        scores = [outcome.score(), score_of_run(run, {}), score_of_run(run, {"groups": "text"})]
    for score in scores:
        assert (score["mood"].rows, score["mood"].right, score["mood"].coverage.right) == (19, 12, 17)
        assert score.by is not None and {name: each["mood"].rows for name, each in score.by.items()} == {
            "a": 9,
            "b": 10,
        }
        assert score.notes[0] == "1 row with gold has no result in this table: not scored"
    side = batch_agent.compare(tmp_path / "run", outcome)["mood"]
    assert (side.rows, side.differs, side.right) == (19, 0, (12, 12))
    other = (
        Pipeline(inputs).map(name="sum", task="In short: {text}").map(name="mood", task="{input}", output_schema=MOODS)
    )
    changed = batch_agent.compare(outcome, await other.run(backend=ScriptedBackend(calm)))
    assert (changed.changed, changed["mood"].rows) == (0, 19)
    assert [row.name for row in changed["mood"].better] == ["r1", "r2"]  # the rows are those of the inputs


async def test_a_table_of_results_has_the_gold_and_what_is_right() -> None:
    pytest.importorskip("pandas")
    frame = (await scored()).to_pandas()
    assert frame["gold"][:5].tolist() == ["angry", "calm", "calm", "calm", "angry"]
    assert frame["right"].sum() == 15
    assert "gold" not in (await scored(gold=None)).to_pandas()


class Shape:
    """A run whose workers are other processes, or whose record is elsewhere."""

    def __init__(self, place: str, **options: Any) -> None:
        self.place, self.options = place, options


@pytest.fixture(params=["processes", "redis"])
def shape(request: pytest.FixtureRequest, tmp_path: Path) -> Shape:
    if request.param == "redis":
        if SERVER is None:
            pytest.skip("redis-server is not installed")
        return Shape(request.getfixturevalue("url"))
    return Shape(str(tmp_path / "run"), cluster=WarmCrew())


async def test_workers_of_other_processes_get_no_gold(shape: Shape, tmp_path: Path) -> None:
    told: list[str] = []

    def script(request: Request) -> Say:
        told.append(json.dumps(request.body))
        return Say('{"mood": "calm"}')

    inputs = [{**row, "label": CANARY if number == 3 else row["label"]} for number, row in enumerate(rows())]
    async with ScriptedServer(script, models=["m"]) as server:
        options = {"backend": server.backend_url, "model": "m", "inputs": inputs, "run_dir": shape.place}
        results = await scored(**options, **shape.options, output_schema={"mood": "text"})
    assert len(told) == 20
    assert not any(CANARY in text for text in told)
    score = results.score()
    assert (score["mood"].right, score["mood"].rows) == (14, 20)
    with open_run(shape.place) as run:
        assert CANARY not in json.dumps(run.facts())
        recorded = score_of_run(run, {})
        if isinstance(run, RedisReader):
            assert '"asked"' in (run.store.get_file("looks.jsonl") or "")
        else:
            assert b'"asked"' in (Path(shape.place) / "looks.jsonl").read_bytes()
    assert recorded["mood"].right == 14
    assert recorded.looks == 0


async def test_the_pilot_is_a_random_sample_and_only_its_rows_are_pending(tmp_path: Path) -> None:
    results = await scored(inputs=rows(100), pilot=20, pilot_only=True, run_dir=tmp_path / "run")
    score = results.score()
    assert (score.all.rows, score.pending, score.population) == (20, 0, 100)
    assert score.sample == "a random sample of the table"
    assert score["mood"].interval == pytest.approx(finite(score["mood"].right, 20, 100))
    with open_run(str(tmp_path / "run")) as run:
        recorded = score_of_run(run, {})
    assert (recorded.all.rows, recorded.pending, recorded.sample) == (20, 0, "a random sample of the table")

    whole = await scored(inputs=rows(100), pilot=20)
    assert whole.score().sample == "rows that you chose: nothing follows for the others"
    chosen = {result.index for result in results}
    only = [{**row, "label": row["label"] if number in chosen else ""} for number, row in enumerate(rows(100))]
    after = (await scored(inputs=only, pilot=20)).score()
    assert (after.sample, after.all.rows) == ("a random sample of the table", 20)


async def test_the_pilot_of_a_pipeline_is_scored() -> None:
    first = Pipeline(rows(100)).map(name="sum", task="Sum up {text}")
    pipeline = first.map(name="mood", task="Mood of {input}", output_schema=MOODS)
    backend = ScriptedBackend(lambda request: Say("short") if "Sum" in str(request.messages) else calm(request))
    outcome = await pipeline.run(backend=backend, gold="label", pilot=20, pilot_only=True)
    score = outcome.results["mood"].score()
    assert (score.all.rows, score.pending, score.sample) == (20, 0, "a random sample of the table")
