import io
import json
import sys
from pathlib import Path
from pkgutil import resolve_name

import pytest

from batch_agent.cli.main import COMMANDS, main


@pytest.fixture(autouse=True)
def in_a_directory_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    Path("spec.yaml").write_text(
        "task: 'Review {path}: {policy}'\nsystem_prompt: Be careful.\nmodel: m\nbackend: vllm://127.0.0.1:9\n"
    )
    Path("rows.jsonl").write_text(
        "".join(json.dumps({"path": f"{i}.py", "policy": "Be kind. " * 200}) + "\n" for i in range(3))
    )


def fail(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Runs a command that must fail, and gives the one line it says."""
    assert main(arguments) == 1
    out, err = capsys.readouterr()
    assert out == "" and "Traceback" not in err
    (line,) = err.splitlines()
    return line


def test_a_dry_run_shows_the_plan_and_the_first_prompt_and_sends_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "spec.yaml", "--inputs", "rows.jsonl", "--dry-run"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    for fact in ("rows            3", "model           m", "hoisted         policy", "shared prefix", "Review «0.py»"):
        assert fact in out


def test_a_dry_run_as_json_is_one_object_and_flags_go_before_the_file(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--inputs", "rows.jsonl", "--dry-run", "--json", "--no-hoist", "--limit", "2", "--model", "other"]
    assert main(["run", "--spec", "spec.yaml", *arguments, "--max-inflight", "5"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert (plan["rows"], plan["model"], plan["hoisted"], plan["max_inflight"]) == (2, "other", [], 5)
    assert plan["first_prompt"].startswith("Review 0.py: Be kind.")


def test_a_dry_run_writes_control_characters_out(capsys: pytest.CaptureFixture[str]) -> None:
    Path("spec.yaml").write_text(
        'task: "two\\nlines \\e[31m [bold]{input}"\nmodel: m\ninputs: [x]\nbackend: vllm://h:1\n'
    )
    assert main(["run", "spec.yaml", "--dry-run"]) == 0
    assert "two\nlines \\x1b[31m [bold]«x»" in capsys.readouterr().out


def test_a_dry_run_styles_what_was_filled_in_on_a_terminal_only(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    Path("spec.yaml").write_text('task: "Review {input}!"\nmodel: m\ninputs: ["\\e[31mx"]\nbackend: vllm://h:1\n')
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    for plain, said in (("", "Review \x1b[1;36m\\x1b[31mx\x1b[0m!"), ("1", "Review «\\x1b[31mx»!")):
        monkeypatch.setenv("NO_COLOR", plain)
        monkeypatch.setattr(sys, "stdout", terminal := Terminal())
        assert main(["run", "spec.yaml", "--dry-run"]) == 0
        assert said in terminal.getvalue()


def test_a_dry_run_warns_of_a_task_that_uses_no_field(capsys: pytest.CaptureFixture[str]) -> None:
    Path("spec.yaml").write_text("task: Review it\nmodel: m\ninputs: [{path: a}, {path: b}]\nbackend: vllm://h:1\n")
    assert main(["run", "spec.yaml", "--dry-run"]) == 0
    assert "warning         the task uses no field of its rows (path)" in capsys.readouterr().out


def test_a_dry_run_names_rows_that_cannot_work(capsys: pytest.CaptureFixture[str]) -> None:
    Path("rows.jsonl").write_text('{"path": "a", "policy": "p"}\n{"path": "b"}\n')
    assert main(["run", "spec.yaml", "--inputs", "rows.jsonl", "--dry-run"]) == 0
    assert "InputError" in capsys.readouterr().out


def test_a_dry_run_needs_no_key_and_a_run_does(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    arguments = ["run", "spec.yaml", "--inputs", "rows.jsonl", "--backend", "openai://"]
    assert main([*arguments, "--dry-run"]) == 0
    assert "backend         openai://api.openai.com" in capsys.readouterr().out
    assert "there is no key for openai://" in fail(arguments, capsys)


def test_what_the_command_line_says_counts_also_where_the_spec_has_the_options_old_name(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with Path("spec.yaml").open("a") as spec:
        spec.write("max_concurrent: 3\n")
    for arguments, inflight in (([], 3), (["--max-inflight", "5"], 5)):
        assert main(["run", "spec.yaml", "--inputs", "rows.jsonl", "--dry-run", "--json", *arguments]) == 0
        assert json.loads(capsys.readouterr().out)["max_inflight"] == inflight


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["gone.yaml"], "batch-agent: cannot read the spec gone.yaml: No such file or directory"),
        (["spec.yaml"], "batch-agent: spec.yaml: there are no inputs; give a file of rows, or - for standard input"),
        (["spec.yaml", "--inputs", "gone.jsonl"], "cannot read the inputs gone.jsonl: No such file"),
        (["spec.yaml", "--inputs", "rows.jsonl", "--backend", "nowhere"], "nowhere"),
        (["spec.yaml", "--inputs", "rows.jsonl", "--output", "./rows.jsonl"], "is the file of the inputs"),
        (["spec.yaml", "--inputs", "rows.jsonl", "--output", "spec.yaml"], "is the file of the spec"),
        (["spec.yaml", "--inputs", "rows.jsonl", "--output", "gone/out.jsonl"], "cannot write the results to gone"),
    ],
)
def test_what_cannot_start_says_why_in_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in fail(["run", *arguments], capsys)


def test_a_field_that_the_first_row_lacks_stops_the_run_before_any_request(capsys: pytest.CaptureFixture[str]) -> None:
    Path("rows.csv").write_text("path\na.py\n")
    assert "policy" in fail(["run", "spec.yaml", "--inputs", "rows.csv"], capsys)


def test_inline_inputs_must_be_a_list(capsys: pytest.CaptureFixture[str]) -> None:
    Path("spec.yaml").write_text("task: x\ninputs: {a: 1}\n")
    assert "spec.yaml line 2: inputs must be a list" in fail(["run", "spec.yaml"], capsys)


def test_what_a_users_module_prints_does_not_reach_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    Path("chatty_tools.py").write_text("print('hello')\ndef look(key: str) -> str:\n    return key\n")
    Path("spec.yaml").write_text("task: x\nmodel: m\nbackend: vllm://h:1\ninputs: [a]\ntools: ['chatty_tools:look']\n")
    assert main(["run", "spec.yaml", "--dry-run", "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["tools"] == ["look"]
    assert err == "hello\n"


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["run", "a.yaml", "--format", "xlsx"],
        ["run", "a.yaml", "--limit", "0"],
        ["run", "a.yaml", "--max-inflight", "many"],
        ["simulate", "--port", "70000"],
        ["simulate", "--policy", "best"],
    ],
)
def test_a_wrong_use_exits_with_1_because_2_means_failed_rows(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(arguments)
    assert exit_.value.code == 1
    err = capsys.readouterr().err
    assert "usage: batch-agent" in err or (err.count("\n") == 1 and "All flags: batch-agent " in err)


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["rn", "spec.yaml"], "there is no command 'rn'; did you mean run?"),
        (["run", "spec.yaml", "--max-inflght", "3"], "--max-inflght; did you mean --max-inflight? Options without a"),
        (["run", "spec.yaml", "--top-p=1"], "--top-p=1; did you mean --set top_p=VALUE?"),
        (["run", "spec.yaml", "--max-concurrent=3"], "--max-concurrent=3; did you mean --max-inflight?"),
        (["run", "spec.yaml", "--prompt", "x"], "--prompt; did you mean --task?"),
        (["resume", "runs/x", "--max-wall=3", "--nonsense"], "--max-wall=3; did you mean --max-wall-time?"),
        (["resume", "runs/x", "--nonsense"], "--nonsense. Options without a flag: --set NAME=VALUE"),
        (["run", "--max-token", "5", "spec.yaml"], "--max-token; did you mean --max-tokens?"),  # no abbreviations
        (["serve", "--por", "8080"], "there is no argument --por; did you mean --port?"),
        (["doctor", "--jsn"], "usage: batch-agent doctor"),
        (["run", "spec.yaml", "another.yaml"], "there is no argument another.yaml"),
        ([], "run a task over rows, from a spec file or from flags"),
    ],
)
def test_a_slip_is_answered_with_what_was_probably_meant(
    arguments: list[str], hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(arguments)
    assert hint in capsys.readouterr().err


def test_help_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, text in ((["--version"], "batch-agent 1."), (["run", "--help"], "exit status:")):
        with pytest.raises(SystemExit) as exit_:
            main(arguments)
        assert exit_.value.code == 0
        assert text in capsys.readouterr().out


def test_every_command_has_help(capsys: pytest.CaptureFixture[str]) -> None:
    for name, command in COMMANDS.items():
        with pytest.raises(SystemExit) as exit_:
            main([name, "--help"])
        assert exit_.value.code == 0
        assert f"usage: batch-agent {name}" in capsys.readouterr().out
        assert callable(resolve_name(f"batch_agent.cli.{command.does.format(name)}"))


def test_the_flags_of_simulate_are_the_fields_of_the_engine(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["simulate", "--help"])
    out = capsys.readouterr().out
    assert all(
        flag in out for flag in ("--kv-tokens", "--no-prefix-caching", "--max-queued", "--policy {fcfs,priority}")
    )
    assert main(["simulate", "--block-size", "0"]) == 1
    assert "block_size must be 1 or more" in capsys.readouterr().err
