"""``resume`` and ``retry-failed`` use what is recorded, name what differs, and drop no recorded answer unasked: alone,
in several processes, in Redis, and in a pipeline."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from tests.cli.commandline import Outcome, batch_agent, program, started

from batch_agent.backends.registry import BACKEND_VARIABLE
from batch_agent.messages import Usage
from batch_agent.record.reader import look, open_run
from batch_agent.testing import Fail, Hang, Request, Say, ScriptedServer

sys.path.insert(0, str(Path(__file__).parents[1] / "record"))
from tests.record.redis_servers import needs_redis

SPECS = {
    "alone": "task: Say {word}\n",
    "processes": "task: Say {word}\nprocesses: 1\n",
    "redis": "task: Say {word}\n",
    "pipeline": "stages:\n  - map: {name: say, task: 'Say {word}'}\n  - map: {name: sum, task: 'Sum {input}'}\n",
}
SHAPES = ["alone", pytest.param("redis", marks=needs_redis), "pipeline"]


class Bench:
    """A spec, its rows and its server. ``script`` decides the answers; by default the request is the answer."""

    def __init__(self, directory: Path, shape: str, server: ScriptedServer, run: str) -> None:
        self.directory, self.shape, self.server, self.run = directory, shape, server, run
        self.script: Callable[[Request], Say | Fail | Hang] = lambda request: Say(request.text)
        self.spec()
        rows = [json.dumps({"id": f"r{n}", "word": f"word {n}"}) + "\n" for n in range(4)]
        (directory / "rows.jsonl").write_text("".join(rows))

    def spec(self, **options: object) -> None:
        more = "".join(f"{name}: {json.dumps(value)}\n" for name, value in options.items())
        text = SPECS[self.shape] + f"inputs: rows.jsonl\nmax_retries: 0\nmodel: m\n{more}"
        (self.directory / "spec.yaml").write_text(text)

    def edit(self, old: str, new: str) -> None:
        path = self.directory / "spec.yaml"
        path.write_text(path.read_text().replace(old, new))

    async def __call__(self, *arguments: str) -> Outcome:
        return await batch_agent(self.directory, *arguments)

    async def begin(self, *arguments: str) -> Outcome:
        return await self("run", "spec.yaml", "--run-dir", self.run, *arguments)

    @property
    def total(self) -> int:
        return 8 if self.shape == "pipeline" else 4

    async def agrees(self) -> int:
        """The number of rows that are ok, on which ``status``, ``export`` and the result lines agree."""
        _, text, _ = await self("status", self.run, "--json")
        exported = read = 0
        for stage in ("/say", "/sum") if self.shape == "pipeline" else ("",):
            if stage and not (self.directory / f"{self.run}{stage}/run.json").exists():
                continue
            _, lines, _ = await self("export", f"{self.run}{stage}", "--format", "jsonl")
            exported += sum(json.loads(line)["ok"] for line in lines.splitlines())
            with open_run(f"{self.run}{stage}") as reader:
                read += reader.rows.counts()[0]
        assert json.loads(text)["rows"]["ok"] == exported == read
        return exported


@pytest.fixture(params=SHAPES)
async def bench(
    tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Bench]:
    shape = request.param
    run = f"{request.getfixturevalue('url')}" if shape == "redis" else "here"
    monkeypatch.chdir(tmp_path)
    async with ScriptedServer(lambda r: made.script(r), models=["m", "other", "third"]) as server:
        monkeypatch.setenv(BACKEND_VARIABLE, server.backend_url)
        made = Bench(tmp_path, shape, server, run)
        yield made


async def test_a_change_of_the_model_stops_before_anything_is_sent_and_names_the_two_ways_on(bench: Bench) -> None:
    code, _, stderr = await bench.begin()
    assert code == 0, stderr
    sent = bench.server.received
    for how in (("resume", bench.run), ("retry-failed", bench.run)):
        code, _, stderr = await bench(*how, "--model", "other")
        if how[0] == "retry-failed":  # no row failed
            assert (code, "no row of" in stderr) == (0, True)
            continue
        assert code == 1
        assert "model: m → other" in stderr and f"{bench.total} recorded answers would be dropped" in stderr
        assert "--keep-answers" in stderr and "--resend" in stderr and "prompt tokens" in stderr
    assert bench.server.received == sent
    assert await bench.agrees() == bench.total
    code, _, stderr = await bench("resume", bench.run, "--model", "other", "--keep-answers")
    assert (code, bench.server.received) == (0, sent), stderr
    assert await bench.agrees() == bench.total
    code, _, stderr = await bench("resume", bench.run, "--resend")  # also answers that were kept
    assert (code, bench.server.received) == (0, 2 * sent), stderr
    assert {request.body["model"] for request in bench.server.requests[sent:]} == {"other"}
    assert await bench.agrees() == bench.total


@pytest.mark.parametrize("bench", [*SHAPES, "processes"], indirect=True)
async def test_the_recorded_backend_and_model_are_used_in_a_shell_without_the_variable(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.edit("model: m\n", "")
    async with (
        ScriptedServer(lambda r: Say(r.text), models=["only"]) as server,
        ScriptedServer(lambda _: Fail(500), models=["n"]) as elsewhere,
    ):
        monkeypatch.setenv(BACKEND_VARIABLE, server.backend_url)
        code, _, stderr = await bench.begin("--limit", "3")
        assert code == 0, stderr
        each = server.received // 3
        monkeypatch.delenv(BACKEND_VARIABLE)
        code, _, stderr = await bench("resume", bench.run, "--limit", "4")
        assert (code, server.received) == (0, 4 * each), stderr
        monkeypatch.setenv(BACKEND_VARIABLE, elsewhere.backend_url)
        (bench.directory / "rows.jsonl").write_text('{"word": "new"}\n')
        code, _, stderr = await bench("resume", bench.run)
        assert (code, server.received, elsewhere.received) == (0, 5 * each, 0), stderr
        assert bench.shape == "pipeline" or "is not used" in stderr


async def test_what_bounds_an_answer_drops_no_complete_one_and_a_cut_one_is_asked_again(bench: Bench) -> None:
    cut = True

    def script(request: Request) -> Say:
        return Say("half", finish_reason="length") if cut and "word 1" in request.text else Say(request.text)

    bench.script = script
    if bench.shape == "pipeline":
        bench.edit("name: say,", "name: say, max_tokens: 20,")
    else:
        bench.spec(max_tokens=20)
    code, _, stderr = await bench.begin()
    assert code == 0, stderr
    sent, cut = bench.server.received, False
    bench.edit("max_tokens: 20", "max_tokens: 200")
    code, _, stderr = await bench("resume", bench.run, "--retries", "2", "--max-inflight", "3")
    assert code == 0, stderr
    assert "max_tokens: 20 → 200" in stderr and "max_retries: 0 → 2" in stderr
    assert bench.server.received == sent + (2 if bench.shape == "pipeline" else 1)
    assert await bench.agrees() == bench.total
    code, _, stderr = await bench("resume", bench.run)
    assert (code, bench.server.received) == (0, sent + (2 if bench.shape == "pipeline" else 1))


async def test_after_a_stopped_resend_everything_agrees_and_going_back_costs_nothing(bench: Bench) -> None:
    code, _, stderr = await bench.begin()
    assert code == 0, stderr
    sent = bench.server.received
    bench.edit("Say {word}", "Shout {word}")
    bench.script = lambda r: Say(r.text, usage=Usage(10**6 if "word 1" in r.text else 1, 0, 1))
    limits = ("--max-inflight", "1", "--max-total-tokens", "100000")
    code, _, stderr = await bench("resume", bench.run, "--resend", *limits)
    assert code == 3, stderr
    done = await bench.agrees()
    assert 0 < done < bench.total
    bench.script = lambda r: Say(r.text)
    bench.edit("Shout {word}", "Say {word}")
    code, _, stderr = await bench("resume", bench.run, "--resend", "--max-total-tokens", "100000000")
    assert code == 0, stderr
    said = [request.text for request in bench.server.requests[sent:] if request.text.startswith("Say")]
    assert said == []
    assert await bench.agrees() == bench.total


async def test_retried_rows_start_again_and_the_estimate_counts_what_will_be_sent(tmp_path: Path) -> None:
    broken = True

    def script(request: Request) -> Say | Fail:
        if "word 2" in request.text or len(request.messages) > 1:
            return Say("no JSON" * 100) if broken else Say('{"word": "w"}')
        return Say('{"word": "w"}')

    async with ScriptedServer(script, models=["m"]) as server:
        spec = Bench(tmp_path, "alone", server, "here")
        spec.spec(backend=server.backend_url, output_schema={"type": "object", "required": ["word"]}, max_turns=4)
        code, _, stderr = await spec.begin("--retries", "2")
        assert (code, server.received) == (2, 6), stderr
        code, _, stderr = await spec("retry-failed", "here", "--type", "RateLimited")
        assert (code, server.received) == (0, 6)
        assert "no row of here failed with RateLimited; those that failed: 1 NotJSON" in stderr
        code, _, stderr = await spec("retry-failed", "here", "--continue")
        assert (code, server.received) == (2, 6)  # its retries are used up
        assert "where they failed, about 0 prompt tokens. Of 1 row max_turns or max_retries is used up" in stderr
        for count in (9, 12):
            code, _, stderr = await spec("retry-failed", "here")
            assert (code, server.received) == (2, count)
            assert "in a new conversation, about" in stderr
            assert max(len(request.messages) for request in server.requests) == 5
        broken = False
        code, _, stderr = await spec("retry-failed", "here", "--from-start")
        assert (code, server.received) == (0, 13), stderr


async def test_python_resumes_are_refused_kept_or_sent_again_in_the_same_way(tmp_path: Path) -> None:
    text = """
import sys
from batch_agent import BatchAgent, Pipeline, SpecError
options = dict(run_dir=sys.argv[1], resume=True)
if sys.argv[4:]:
    options["on_change"] = sys.argv[4]
try:
    if sys.argv[3] == "run":
        print(len(BatchAgent.run_sync(task=sys.argv[2], inputs=["a", "b"], **options)))
    else:
        import asyncio
        print(len(asyncio.run(Pipeline(["a", "b"]).map(task=sys.argv[2]).run(**options)).outputs))
except SpecError as error:
    print(error)
"""
    (tmp_path / "script.py").write_text(text)
    async with ScriptedServer(lambda r: Say(r.text), models=["m"]) as server:
        for kind in ("run", "pipeline"):
            sent = server.received
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv(BACKEND_VARIABLE, server.backend_url)
                assert "2" in (await program(tmp_path, "script.py", kind, "Say {input}", kind)).stdout
            assert "2" in (await program(tmp_path, "script.py", kind, "Say {input}", kind)).stdout
            refused = (await program(tmp_path, "script.py", kind, "Shout {input}", kind)).stdout
            assert "task: 1 word" in refused and 'on_change="keep"' in refused and "2 recorded answers" in refused
            assert server.received == sent + 2
            await program(tmp_path, "script.py", kind, "Shout {input}", kind, "keep")
            assert server.received == sent + 2
            await program(tmp_path, "script.py", kind, "Scream {input}", kind, "resend")
            assert server.received == sent + 4


def rows_of(bench: Bench, **words: str) -> None:
    """Write the rows of these ids and words."""
    lines = [json.dumps({"id": name, "word": word}) + "\n" for name, word in words.items()]
    (bench.directory / "rows.jsonl").write_text("".join(lines))


WORDS = {f"r{n}": f"word {n}" for n in range(4)}


@pytest.mark.parametrize("bench", [*SHAPES, "processes"], indirect=True)
async def test_rows_that_changed_are_counted_before_anything_is_sent_and_sent_again_only_when_allowed(
    bench: Bench,
) -> None:
    assert (await bench.begin()).code == 0
    sent, each = bench.server.received, bench.total // 4
    changed = {"r0": "word 0", "r1": "word 1.", "r3": "word 3", "r4": "word 4"}
    rows_of(bench, **changed)
    counts = "kept 2, to send 2 (1 changed, 1 new), no longer asked for 1"
    refused = await bench("resume", bench.run)
    assert (refused.code, bench.server.received) == (1, sent), refused.stderr
    for words in (counts, "1 recorded answer would be dropped", "--keep-answers", "--resend", "by index: 1"):
        assert words in refused.stderr
    planned = await bench("resume", bench.run, "--dry-run")
    assert planned.code == 0 and counts in planned.stdout and "--resend" in planned.stdout, planned.stderr
    again = await bench("run", "spec.yaml", "--run-dir", bench.run, "--resume", "--dry-run", "--json")
    whole = json.loads(again.stdout)["resume"]
    rows = whole["rows"]["say"] if bench.shape == "pipeline" else whole["rows"]
    assert whole["dropped_answers"] == rows["changed"] == 1
    assert (rows["kept"], rows["to_send"], rows["new"], rows["no_longer_asked_for"]) == (2, 2, 1, 1)
    assert bench.server.received == sent

    kept = await bench("resume", bench.run, "--keep-answers")
    assert (kept.code, bench.server.received) == (0, sent + each), kept.stderr
    assert "kept 3, to send 1 (1 new), no longer asked for 1" in kept.stderr
    stays = await bench("resume", bench.run)
    assert (stays.code, bench.server.received) == (0, sent + each), stays.stderr
    resent = await bench("resume", bench.run, "--resend")
    assert (resent.code, bench.server.received) == (0, sent + 2 * each), resent.stderr
    assert "to send 1 (1 changed)" in resent.stderr
    assert sorted(request.text for request in bench.server.requests).count("Say word 1.") == 1


@pytest.mark.parametrize("bench", [*SHAPES, "processes"], indirect=True)
async def test_rows_with_other_ids_and_the_same_words_keep_their_answers(bench: Bench) -> None:
    assert (await bench.begin("--limit", "3")).code == 0
    sent, each = bench.server.received, bench.total // 4
    rows_of(bench, **{f"x{name}": word for name, word in WORDS.items()})
    code, _, stderr = await bench("resume", bench.run, "--limit", "4")
    assert (code, bench.server.received) == (0, sent + each), stderr
    assert "kept 3, to send 1 (1 new)" in stderr and "3 rows with another id than before are matched by" in stderr
    code, _, stderr = await bench("resume", bench.run, "--set", "id_column=word", "--limit", "4", "--no-retry-failed")
    assert (code, bench.server.received) == (0, sent + each), stderr
    assert "kept 4, to send 0" in stderr and "4 rows with another id" in stderr
    code, out, stderr = await bench("show", bench.run, "--row", "word 0")
    assert code == 0 and "Say word 0" in out, stderr
    assert await bench.agrees() == bench.total


@pytest.mark.parametrize("bench", SHAPES[1:2], indirect=True)
async def test_a_record_of_results_alone_is_compared_like_any_other(bench: Bench) -> None:
    bench.spec(keep="results")
    assert (await bench.begin()).code == 0
    sent = bench.server.received
    rows_of(bench, **{f"x{name}": word for name, word in WORDS.items()})
    renamed = await bench("resume", bench.run)
    assert (renamed.code, bench.server.received) == (0, sent), renamed.stderr
    assert [json.loads(line)["job_id"] for line in renamed.stdout.splitlines()] == ["xr0", "xr1", "xr2", "xr3"]
    assert await bench.agrees() == 4
    rows_of(bench, **{f"x{name}": f"{word}{'.' * (name == 'r1')}" for name, word in WORDS.items()})
    refused = await bench("resume", bench.run)
    assert (refused.code, bench.server.received) == (1, sent), refused.stderr
    assert "kept 3, to send 1 (1 changed)" in refused.stderr
    assert (await bench("resume", bench.run, "--keep-answers")).code == 0
    assert bench.server.received == sent
    assert (await bench("resume", bench.run, "--resend")).code == 0
    assert bench.server.received == sent + 1


@pytest.mark.parametrize("bench", [*SHAPES[:2], "processes"], indirect=True)
async def test_a_model_that_is_changed_and_changed_back_is_paid_once(bench: Bench) -> None:
    assert (await bench.begin()).code == 0
    assert (await bench("resume", bench.run, "--model", "other", "--resend")).code == 0
    sent = bench.server.received
    for model in ("m", "other", "m"):
        code, _, stderr = await bench("resume", bench.run, "--model", model)
        assert (code, bench.server.received) == (0, sent), stderr
        assert "kept 4, to send 0" in stderr or "is complete" in stderr


@pytest.mark.parametrize("bench", SHAPES[:2], indirect=True)
async def test_a_run_that_is_cancelled_by_control_ends_with_a_status_of_its_own(bench: Bench) -> None:
    bench.script = lambda r: Hang()
    async with started(bench.directory, "run", "spec.yaml", "--run-dir", bench.run) as process:
        await bench.server.wait_until(lambda: bench.server.inflight > 0)
        while (await bench("control", bench.run, "cancel")).code:
            await asyncio.sleep(0.1)
        assert await process.wait() == 5
    assert look(bench.run if bench.shape == "redis" else bench.directory / bench.run).state == "interrupted"
