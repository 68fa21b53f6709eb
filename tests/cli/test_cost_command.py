"""Budgets, prices and the response cache on the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.cli.commandline import batch_agent

from batch_agent.backends.cache_store import FILE
from batch_agent.cli.main import main
from batch_agent.messages import Usage
from batch_agent.testing import Say, ScriptedServer

USAGE = Usage(100, 0, 50)


def write_spec(directory: Path, backend: str, more: str = "") -> None:
    rows = json.dumps([f"row {number}" for number in range(40)])
    (directory / "spec.yaml").write_text(
        f"task: 'Say {{input}}'\nmodel: m\nbackend: {backend}\nmax_inflight: 2\nmax_tokens: 50\ninputs: {rows}\n{more}"
    )


@pytest.mark.parametrize(
    ("flags", "limit"),
    [
        (["--max-total-tokens", "1000"], "max_total_tokens 1,000"),
        (["--max-cost", "0.002"], "max_cost $0.002"),
    ],
)
async def test_a_run_that_is_out_of_budget_says_which_limit_and_exits_with_3(
    flags: list[str], limit: str, tmp_path: Path
) -> None:
    async with ScriptedServer(lambda _: Say("ok", usage=USAGE), models=["m"]) as server:
        write_spec(tmp_path, server.backend_url, "prices: {input: 1, output: 4}")
        outcome = await batch_agent(tmp_path, "run", "spec.yaml", "--output", "out.jsonl", *flags)
    assert outcome.code == 3
    assert "out of budget" in outcome.stderr and limit in outcome.stderr and "higher limit" in outcome.stderr
    done = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert sum(result["ok"] for result in done) == len(server.requests) == 6
    assert {result["cost"] for result in done if result["ok"]} == {0.0003}


async def test_a_second_run_with_a_cache_asks_nothing_and_the_cache_can_be_listed_and_cleared(tmp_path: Path) -> None:
    async with ScriptedServer(lambda _: Say("ok", usage=USAGE), models=["m"]) as server:
        write_spec(tmp_path, server.backend_url, "temperature: 0")
        for _ in range(2):
            arguments = ("spec.yaml", "--json", "--output", "out.jsonl", "--cache=answers")
            outcome = await batch_agent(tmp_path, "run", *arguments)
            assert outcome.code == 0, outcome.stderr
        assert len(server.requests) == 40
    summary = json.loads(outcome.stdout)
    assert summary["saved"]["response_cache_answers"]["value"] == 40
    assert summary["tokens"]["prompt"] == 0

    listed = await batch_agent(tmp_path, "cache", "list", "--json", "--cache", "answers")
    record = json.loads(listed.stdout)
    assert (record["answers"], record["models"][0]["model"]) == (40, "m")
    cleared = await batch_agent(tmp_path, "cache", "clear", "--cache", "answers")
    assert "deleted 40 answers" in cleared.stdout


def test_a_cache_that_is_not_there_is_empty_and_is_not_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BATCH_AGENT_CACHE", str(tmp_path / "none"))
    assert main(["cache", "list"]) == main(["cache", "prune"]) == main(["cache", "clear"]) == 0
    said = capsys.readouterr().out
    assert f"{tmp_path / 'none' / FILE}: 0 answers" in said and "deleted 0 answers" in said
    assert not (tmp_path / "none").exists()


def test_a_cache_in_a_spec_file_is_beside_that_file_and_needs_temperature_0(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_spec(tmp_path, "vllm://nowhere", "cache: answers")
    assert main(["run", str(tmp_path / "spec.yaml"), "--dry-run"]) == 1
    assert "temperature=0 or a seed" in capsys.readouterr().err
    write_spec(tmp_path, "vllm://nowhere", "cache: answers\ntemperature: 0")
    assert main(["run", str(tmp_path / "spec.yaml"), "--dry-run"]) == 0
    assert not (tmp_path / "answers").exists()


def test_a_dry_run_estimates_the_cost_and_says_how(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_spec(tmp_path, "vllm://nowhere", "prices: {input: 1, output: 2}\nmax_cost: 3")
    assert main(["run", str(tmp_path / "spec.yaml"), "--dry-run", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    tokens = record["estimated_tokens"]["first_requests"]
    assert record["estimated_cost"]["nothing_cached"] == pytest.approx((tokens + 40 * 50 * 2) / 1e6)
    assert "answers of 50 tokens (max_tokens), the prices given" in record["estimated_cost"]["how"]
    assert main(["run", str(tmp_path / "spec.yaml"), "--dry-run"]) == 0
    text = capsys.readouterr().out
    assert "cost            $0.0041: first requests" in text and "ends at         $3" in text


def test_a_dry_run_counts_tools_the_schema_and_a_later_turn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "searching.py").write_text(
        f'def look_up(key: str) -> str:\n    """Look up. {"Many words. " * 50}"""\n    return key\n'
    )
    seen = []
    for more in ("", "tools: ['searching:look_up']", "output_schema: {label: string, why: string}"):
        write_spec(tmp_path, "vllm://nowhere", f"prices: {{input: 1, output: 2}}\n{more}")
        assert main(["run", str(tmp_path / "spec.yaml"), "--dry-run", "--json"]) == 0
        seen.append(json.loads(capsys.readouterr().out))
    plain, tools, schema = (each["estimated_tokens"] for each in seen)
    assert tools["tools"] > 100 and schema["schema"] > 10
    assert plain["tools"] == plain["schema"] == 0 and plain["all_requests"] == plain["first_requests"]
    assert tools["first_requests"] == plain["first_requests"] + 40 * tools["tools"]
    assert schema["first_requests"] == plain["first_requests"] + 40 * schema["schema"]
    assert tools["all_requests"] > 2 * tools["first_requests"]
    costs = [each["estimated_cost"]["nothing_cached"] for each in seen]
    assert costs[1] - costs[0] > (tools["all_requests"] - plain["all_requests"]) / 1e6
    assert main(["run", str(tmp_path / "spec.yaml"), "--dry-run", "--set", "max_turns=1"]) == 0
    assert "all requests" not in capsys.readouterr().out


def test_a_dry_run_without_prices_says_what_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_spec(tmp_path, "vllm://nowhere")
    assert main(["run", str(tmp_path / "spec.yaml"), "--dry-run"]) == 0
    assert "no price is known; give prices" in capsys.readouterr().out


@pytest.mark.parametrize("flags", [["--max-cost", "0"], ["--max-cost", "nan"], ["--max-wall-time", "soon"]])
def test_a_limit_that_is_no_limit_is_refused(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["run", "spec.yaml", *flags])
    assert caught.value.code == 1
    assert "must be a number of" in capsys.readouterr().err


def test_a_dry_run_says_what_it_would_cost_elsewhere(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_spec(tmp_path, "vllm://nowhere:1", "prices: {input: 1, output: 4}")
    command = ["run", str(tmp_path / "spec.yaml"), "--dry-run"]
    assert main([*command, "--compare", "--gpu-price", "3.6", "--gpu-speed", "100"]) == 0
    out = capsys.readouterr().out
    assert "All numbers are estimates" in out and "given/prices" in out and "at 100 tokens a second" in out
    assert main([*command, "--json", "--compare"]) == 0
    [offer] = json.loads(capsys.readouterr().out)["comparison"]["offers"]
    assert offer["provider"] == "given" and offer["nothing_cached"] > 0
    for wrong, says in (
        (["run", command[1], "--compare"], "--compare is for --dry-run"),
        ([*command, "--gpu-speed", "3"], "--gpu-speed needs --gpu-price"),
    ):
        assert main(wrong) == 1
        assert says in capsys.readouterr().err
