"""Runs that the command line alone describes."""

import io
import json
import os
import sys
from pathlib import Path

import pytest

from batch_agent.cli.main import add_arguments, build_parser, main
from batch_agent.cli.spec.load import load_spec, resolve_paths, schema_of, take_settings
from batch_agent.cli.spec.rows import read_pipe
from batch_agent.cli.spec.specfile import load_env_file
from batch_agent.compiler.schema import OutputSchema
from batch_agent.errors import BatchAgentError, SpecError
from batch_agent.observe.text import terminal_width

BACKEND = ["--backend", "simulated://instant"]


@pytest.fixture(autouse=True)
def in_a_directory_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    Path("rows.csv").write_text("id,text\na,one\nb,two\n")


def plan(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> dict[str, object]:
    assert main(["run", *arguments, *BACKEND, "--dry-run", "--json"]) == 0
    shown: dict[str, object] = json.loads(capsys.readouterr().out)
    return shown


def complaint(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert main(arguments) == 1
    err = capsys.readouterr().err
    assert "Traceback" not in err
    return err


def test_a_task_and_rows_are_a_run(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--task", "Label {text}", "rows.csv", "--schema", '{"label": "a|b|c"}', "--output", "out.jsonl"]
    assert main(["run", *arguments, *BACKEND]) == 0
    results = [json.loads(line) for line in Path("out.jsonl").read_text().splitlines()]
    assert {result["job_id"] for result in results} == {"a", "b"}
    assert all(result["output"]["label"] in ("a", "b", "c") for result in results)
    [directory] = Path("runs").iterdir()
    assert directory.name.startswith("rows-")
    assert f"batch-agent show runs/{directory.name}" in capsys.readouterr().err


def test_a_column_names_the_rows_and_a_table_has_them_in_input_order_with_their_columns_first(
    capsys: pytest.CaptureFixture[str],
) -> None:
    Path("refs.csv").write_text("ref,text\nR001,one\nR002,two\nR003,three\n")
    arguments = ["--task", "Say {text}", "refs.csv", "--id-column", "ref", "--run-dir", "r", "--output", "out.csv"]
    assert main(["run", *arguments, *BACKEND]) == 0
    header, *lines = Path("out.csv").read_text().splitlines()
    assert header.startswith("ref,text,output,ok,")
    assert [line.split(",")[:2] for line in lines] == [["R001", "one"], ["R002", "two"], ["R003", "three"]]
    capsys.readouterr()
    assert main(["show", "r", "--row", "R003"]) == 0
    assert "three" in capsys.readouterr().out
    assert main(["show", "r", "--row", "R004"]) == 1
    assert "id_column: the first input has no field 'nr'" in complaint(
        ["run", "--task", "Say {text}", "refs.csv", "--id-column", "nr", *BACKEND], capsys
    )


def test_every_option_can_be_said(capsys: pytest.CaptureFixture[str]) -> None:
    Path("mine.py").write_text("class Label:\n    pass\ndef look(key: str) -> str:\n    return key\n")
    question = ["--task", "Say {text}", "rows.csv", "--tool", "mine:look", "--system", "Be brief."]
    settings = ["--set", "max_turns=4", "--set", "max-inflight=3", "--temperature", "0", "--set", "model=other"]
    shown = plan([*question, *settings], capsys)
    assert (shown["tools"], shown["system"], shown["max_turns"]) == (["look"], "Be brief.", 4)
    assert (shown["max_inflight"], shown["model"]) == (3, "other")


def test_what_is_said_takes_the_place_of_what_a_spec_says(capsys: pytest.CaptureFixture[str]) -> None:
    Path("spec.yaml").write_text("task: 'Spec {text}'\nsystem_prompt: {file: gone.txt}\ntemperature: 1\n")
    shown = plan(["--spec", "spec.yaml", "rows.csv", "--system", "Mine."], capsys)
    assert (shown["system"], shown["first_prompt"]) == ("Mine.", "Spec one")


def test_none_can_be_set_also_for_an_option_that_has_a_flag() -> None:
    _, parsers = build_parser()
    add_arguments("run", parsers["run"])
    for flags, outage in ((["--max-outage", "5"], 5), (["--max-outage", "5", "--set", "max_outage=null"], None)):
        options = parsers["run"].parse_args(["--task", "Say {text}", "rows.csv", "--no-run-dir", *flags])
        take_settings(options)
        resolve_paths(options)
        assert load_spec(options).max_outage == outage


def test_a_run_without_a_spec_is_resumed_from_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--task", "Say {text}", "rows.csv", "--run-dir", "run", "--set", "max_tokens=9", "--output", "o.jsonl"]
    assert main(["run", *arguments, *BACKEND]) == 0
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    with (tmp_path / "rows.csv").open("a") as file:
        file.write("c,three\n")
    capsys.readouterr()
    assert main(["resume", str(tmp_path / "run")]) == 0
    err = capsys.readouterr().err
    assert "kept 2, to send 1 (1 new)" in err and "2 of them from the record" in err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["run"], "give a spec file, or --task and a file of rows"),
        (["run", "--task", "x {text}"], "there are no inputs; give a file of rows, or - for standard input"),
        (["run", "--task", "x", "rows.csv", "--inputs", "rows.csv"], "the rows are given twice"),
        (["run", "--task", "x", "rows.csv", "--set", "api_key=sk-1"], "use --env-file"),
        (["run", "--task", "x", "rows.csv", "--set", "resume=true"], "--set resume: give --resume"),
        (["run", "--task", "x", "rows.csv", "--set", "max_turns"], "is not OPTION=VALUE"),
        (["run", "--task", "{text}", "rows.csv", "--set", "max_trns=4"], "did you mean 'max_turns'"),
        (["run", "--task", "{text}", "rows.csv", "--set", "max_turns=many"], "max_turns: must be a whole number"),
        (["run", "--task", "{text}", "rows.csv", "--schema", '{"a": "spam"}'], '--schema a is "spam": a field is'),
        (["run", "--task", "{text}", "rows.csv", "--schema", "nomodule:X"], "there is no module nomodule"),
        (
            ["run", "--task", "{text}", "rows.ods"],
            "is a spreadsheet, which is not supported: save it as .xlsx or CSV. Supported:",
        ),
    ],
)
def test_what_cannot_be_is_said(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("rows.ods").write_bytes(b"PK")
    assert says in complaint(arguments, capsys)


@pytest.mark.parametrize(
    ("content", "code", "says"),
    [
        ("", 2, "rows.csv is empty: there are no rows"),
        ("id,text\n", 2, "rows.csv has only line 1, which names the columns: there are no rows"),
        ("id;text\na;one\n", 1, "rows.csv line 1: its columns are separated by semicolons, not commas"),
        ("id\ttext\na\tone\n", 1, "rows.csv line 1: its columns are separated by tabs, not commas: name it .tsv"),
        ('id,text\na,one\nb,"two\nc,three\n', 1, "rows.csv line 3: a quote opens in this row and is not closed"),
        ('"id,text\na,one\n', 1, "rows.csv line 1: a quote opens"),
    ],
)
def test_a_file_that_holds_no_rows_or_is_no_csv_is_named_with_its_line(
    content: str, code: int, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("rows.csv").write_text(content)
    assert main(["run", "--task", "Say {text}", "rows.csv", "--no-run-dir", *BACKEND]) == code
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    ("kind", "content", "expected"),
    [
        ("text", b"one\n\n two\r\n", ["one", " two"]),
        ("csv", b'id,text\na,"o\nne"\nb,two', [{"id": "a", "text": "o\nne"}, {"id": "b", "text": "two"}]),
        ("tsv", b"id\ttext\na\tone\n", [{"id": "a", "text": "one"}]),
        ("jsonl", b'{"a": 1}\n"b"\n', [{"a": 1}, "b"]),
    ],
)
async def test_a_pipe_holds_what_format_says(kind: str, content: bytes, expected: list[object]) -> None:
    reader, writer = os.pipe()
    os.write(writer, content)
    os.close(writer)
    assert [row async for row in read_pipe(reader, "pipe", None, f".{kind}")] == expected


async def test_a_quote_that_a_pipe_never_closes_ends_the_run() -> None:
    reader, writer = os.pipe()
    os.write(writer, b'a\n"1\n')
    os.close(writer)
    with pytest.raises(BatchAgentError, match="pipe line 2: a quote opens"):
        _ = [row async for row in read_pipe(reader, "pipe", None, ".csv")]


def test_a_schema_in_few_words_is_a_json_schema(tmp_path: Path) -> None:
    text = '{"label": "a|b", "score": "number", "tags": ["text"], "at": {"x": "int"}, "sure": "bool"}'
    short = OutputSchema.of(schema_of(text, tmp_path))
    assert short is not None
    schema = short.json_schema
    assert schema["required"] == ["label", "score", "tags", "at", "sure"]
    assert schema["properties"] == {
        "label": {"type": "string", "enum": ["a", "b"]},
        "score": {"type": "number"},
        "tags": {"type": "array", "items": {"type": "string"}},
        "at": {
            "type": "object",
            "properties": {"x": {"type": "integer"}},
            "required": ["x"],
            "additionalProperties": False,
        },
        "sure": {"type": "boolean"},
    }
    answer = {"label": "a", "score": 1, "tags": ["x"], "at": {"x": 1, "y": 2}, "sure": True}
    given = json.dumps(answer | {"why": "more than it was asked for"})
    assert short.validate_json(given) == answer | {"at": {"x": 1}}, "other fields are ignored, as in a class"
    whole = {"type": "object", "properties": {"a": {"type": "string"}}}
    (tmp_path / "schema.json").write_text(json.dumps(whole))
    assert schema_of(json.dumps(whole), tmp_path) == schema_of("schema.json", tmp_path) == whole
    assert schema_of("module:Class", tmp_path) == "module:Class"


def test_an_env_file_sets_what_is_not_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BA_SET", "mine")
    for name in ("BA_ONE", "BA_TWO", "BA_THREE"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    path = tmp_path / "keys"
    path.write_text("# keys\nexport BA_ONE=1 # one\nBA_TWO='a # b'\n\nBA_THREE=\"x\"\nBA_SET=theirs\n")
    load_env_file(path)
    assert [os.environ[name] for name in ("BA_ONE", "BA_TWO", "BA_THREE", "BA_SET")] == ["1", "a # b", "x", "mine"]
    path.write_text("sk-secret\n")
    with pytest.raises(SpecError, match=r"keys line 1 is not NAME=VALUE$"):
        load_env_file(path)


def test_a_run_finds_its_key_in_an_env_file(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "")
    monkeypatch.delenv("OPENAI_API_KEY")
    Path(".env").write_text("OPENAI_API_KEY=sk-from-a-file\n")
    arguments = ["run", "--task", "{text}", "rows.csv", "--no-run-dir", "--model", "simulated"]
    assert "there is no key" in complaint([*arguments, "--backend", "openai://"], capsys)
    assert main([*arguments, *BACKEND, "--env-file", ".env"]) == 0
    assert os.environ["OPENAI_API_KEY"] == "sk-from-a-file"


def test_a_dash_is_standard_output(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--task", "{text}", "rows.csv", "--output", "-", "--no-run-dir", *BACKEND]) == 0
    assert len(capfd.readouterr().out.splitlines()) == 2
    assert not Path("-").exists()


def test_what_was_sent_and_received_is_told_and_secrets_are_cut_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SOME_API_KEY", "sk-very-secret")
    Path("rows.csv").write_text("text\nmy key is sk-very-secret\n")
    arguments = ["--task", "Say {text}", "rows.csv", "--no-run-dir", "--output", "o.jsonl", "-v"]
    assert main(["run", *arguments, *BACKEND, "--log-file", "log.jsonl"]) == 0
    sent, received = (json.loads(line) for line in Path("log.jsonl").read_text().splitlines())
    assert sent["sent"][-1] == {"role": "user", "content": "Say my key is [redacted]"}
    assert (received["row"], received["turn"], received["received"]["role"]) == ("0", 1, "assistant")
    err = capsys.readouterr().err
    assert "> row 0, turn 1: user: Say my key is [redacted]" in err and "< row 0, turn 1" in err
    assert "sk-very-secret" not in err + Path("log.jsonl").read_text()
    assert Path("log.jsonl").stat().st_mode & 0o077 == 0


def test_standard_error_that_is_no_terminal_is_not_wrapped() -> None:
    assert terminal_width(io.StringIO()) is None


def test_a_column_of_images_is_looked_up_beside_the_rows(capsys: pytest.CaptureFixture[str]) -> None:
    Path("data").mkdir()
    Path("data/rows.csv").write_text("photo\na.png\nb.png\n")
    Path("data/a.png").write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(20))
    question = ["--task", "See {photo}", "data/rows.csv", "--set", 'images=["photo"]']
    assert main(["run", *question, "--backend", "http://h/v1", "--model", "m", "--dry-run", "--json"]) == 0
    shown = capsys.readouterr().out
    assert "See [image sha256:" in shown
    assert "data/b.png cannot be read" in shown


def test_samples_and_votes_are_flags_for_all_fields_or_for_each(capsys: pytest.CaptureFixture[str]) -> None:
    Path("picks.py").write_text("def first(values):\n    return values[0]\n")
    asked = ["--task", "Say {text}", "rows.csv", "--schema", '{"mood": "a|b", "price": "number"}', "--samples", "3"]
    assert (plan([*asked], capsys)["samples"], plan([*asked], capsys)["samples_at_once"]) == (3, 2)
    for vote, voted, at_once in (
        (["--vote", "median"], "mood, price", 2),
        (["--vote", "price=median", "--vote", "mood=picks:first"], "price, mood", 3),
        (["--vote", "picks:first"], "mood, price", 3),
    ):
        assert main(["run", *asked, *vote, *BACKEND, "--dry-run"]) == 0
        assert f"voted: {voted}" in capsys.readouterr().out
        assert plan([*asked, *vote], capsys)["samples_at_once"] == at_once
    assert "tone" in complaint(["run", *asked, "--vote", "tone=majority", *BACKEND], capsys)
    assert "needs a temperature above 0" in complaint(["run", *asked, "--temperature", "0", *BACKEND], capsys)
