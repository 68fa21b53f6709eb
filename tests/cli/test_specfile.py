import sys
from pathlib import Path

import pytest
from pydantic import BaseModel

from batch_agent.cli.spec.specfile import read_specfile
from batch_agent.errors import SpecError
from batch_agent.spec import BatchSpec


@pytest.fixture(autouse=True)
def own_imports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "modules", dict(sys.modules))


def resolve(path: Path, text: str, **overrides: object) -> BatchSpec:
    path.write_text(text)
    return read_specfile(path).resolve({"inputs": ["x"], **overrides})


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("spec.yaml", "task: 'Say {input}'\nmax_inflight: null\ntemperature: 0.5\nstop: [a, b]\n"),
        ("spec.yml", "{task: 'Say {input}', max_inflight: null, temperature: 0.5, stop: [a, b]}"),
        ("spec.json", '{"task": "Say {input}", "max_inflight": null, "temperature": 0.5, "stop": ["a", "b"]}'),
        ("spec.toml", 'task = "Say {input}"\ntemperature = 0.5\nstop = ["a", "b"]\n'),
    ],
)
def test_the_three_formats_say_the_same(tmp_path: Path, name: str, text: str) -> None:
    spec = resolve(tmp_path / name, text)
    assert (spec.task, spec.temperature, spec.stop) == ("Say {input}", 0.5, ["a", "b"])
    assert spec.given("max_inflight") == (name != "spec.toml")


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("spec.yaml", "", r"spec\.yaml is empty"),
        ("spec.yaml", "# nothing\n", r"spec\.yaml is empty"),
        ("spec.toml", "", r"spec\.toml is empty"),
        ("spec.json", " ", r"spec\.json is empty"),
        ("spec.yaml", "- task: x\n", r"spec\.yaml must be a mapping of options.*not a list"),
        ("spec.yaml", "just words", "not text"),
        ("spec.yaml", "task: x\n  bad: [1\n", r"spec\.yaml line 2 is not YAML"),
        ("spec.yaml", "task: x\nwhen: 2024-02-31\n", r"spec\.yaml is not YAML: day"),
        ("spec.yaml", "1: x\n", "1 is not the name of an option"),
        ("spec.yaml", "task: x\nmodel: a\n'model': b\n", r"spec\.yaml line 3 is not YAML: 'model' is given twice"),
        ("spec.yaml", "task: x\nextra_body:\n  - {a: 1, a: 1}\n", r"spec\.yaml line 3 is not YAML: 'a' is given twice"),
        ("spec.json", '{"task": "x", "task": "y"}', r"spec\.json has 'task' twice"),
        ("spec.yaml", f"task: {'[' * 5000}", r"spec\.yaml is nested too deeply"),
        ("spec.json", '{"task": ' + "[" * 100_000, r"spec\.json is nested too deeply"),
        ("spec.toml", f"task = {'[' * 5000}", r"spec\.toml is nested too deeply"),
        ("spec.toml", f"seed = {'9' * 5000}", r"spec\.toml is not TOML: .*digits"),
        ("spec.json", f'{{"seed": {"9" * 5000}}}', r"spec\.json is not JSON: .*digits"),
        ("spec.yaml", f"seed: {'9' * 5000}", r"spec\.yaml is not YAML: .*digits"),
        ("spec.toml", "task = x\n", r"spec\.toml is not TOML.*line 1"),
        ("spec.json", '{"task": "x",\n 1}', r"spec\.json line 2 is not JSON"),
        ("spec.txt", "task: x", r"a spec file ends in \.yaml"),
        ("spec.yaml", "task: x\ntaks: y\n", r"spec\.yaml line 2: there is no option 'taks'; did you mean 'task'"),
        ("spec.toml", 'task = "x"\n\nmax_inflight = 0\n', r"spec\.toml line 3: max_inflight: .*above 0"),
        ("spec.json", '{"task": "x",\n "max_turns": "a"}', r"spec\.json line 2: max_turns:"),
        ("spec.json", '{"temperature": -1, "task": "x"}', r"spec\.json line 1: temperature:"),
        ("spec.yaml", "system_prompt: x\n", r"spec\.yaml: task is missing"),
        ("spec.yaml", "task: x\non_result: print\n", r"spec\.yaml line 2: on_result cannot be given in a file"),
        ("spec.yaml", "task: x\ntools: read_file\n", r"spec\.yaml line 2: tools: must be a list of names"),
        ("spec.yaml", "task: x\ntools: [{a: 1}]\n", r"line 2: tools: .* is not the name of a tool"),
        ("spec.yaml", "task: x\ntools: ['a b:c']\n", r"tools: 'a b:c' must be module:name"),
        ("spec.yaml", "task: x\ntools: ['no_such_module_here:f']\n", "there is no module no_such_module_here"),
        ("spec.yaml", "task: x\ntools: ['json:nothing']\n", "there is no nothing in the module json"),
        ("spec.yaml", "task: x\noutput_schema: Review\n", r"line 2: output_schema: 'Review' must be a JSON schema or"),
        ("spec.yaml", "task: {file: gone.txt}\n", r"line 1: task: cannot read .*gone\.txt: No such file"),
    ],
)
def test_an_error_names_the_file_and_where_it_can_the_line(tmp_path: Path, name: str, text: str, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        resolve(tmp_path / name, text)


def test_a_misspelt_key_is_named_when_the_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "spec.yaml").write_text("task: x\ninput: rows.csv\n")
    with pytest.raises(SpecError, match=r"spec\.yaml line 2: there is no option 'input'; did you mean 'inputs'"):
        read_specfile(tmp_path / "spec.yaml")


def test_a_file_that_is_not_there_or_not_text_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"cannot read the spec .*gone\.yaml: No such file"):
        read_specfile(tmp_path / "gone.yaml")
    (tmp_path / "spec.yaml").write_bytes(b"task: \xff\xfe")
    with pytest.raises(SpecError, match=r"spec\.yaml is not UTF-8"):
        read_specfile(tmp_path / "spec.yaml")


def test_tools_and_schemas_are_imported_from_beside_the_spec(tmp_path: Path) -> None:
    (tmp_path / "nearby.py").write_text(
        "from pydantic import BaseModel\n"
        "class Outer:\n    class Answer(BaseModel):\n        text: str\n"
        "def look(key: str) -> str:\n    return key\n"
    )
    text = "task: x\ntools: [read_file, 'nearby:look']\noutput_schema: 'nearby:Outer.Answer'\n"
    spec = resolve(tmp_path / "spec.yaml", text)
    builtin, look = spec.tools
    assert builtin == "read_file" and look("k") == "k"
    assert issubclass(spec.output_schema, BaseModel)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("1 / 0\n", r"importing broken failed: ZeroDivisionError: division by zero \(broken\.py line 1\)"),
        ("import no_such_thing\n", r"importing broken failed: ModuleNotFoundError: .*no_such_thing"),
        ("raise SystemExit(0)\n", r"importing broken failed: SystemExit: 0 \(broken\.py line 1\)"),
        ("def f(:\n", r"importing broken failed: SyntaxError: .*broken\.py, line 1"),
    ],
)
def test_a_module_that_fails_to_import_is_the_users_to_mend(tmp_path: Path, source: str, message: str) -> None:
    (tmp_path / "broken.py").write_text(source)
    with pytest.raises(SpecError, match=message):
        resolve(tmp_path / "spec.yaml", "task: x\ntools: ['broken:f']\n")


def test_an_inline_schema_and_a_backend_mapping_go_through(tmp_path: Path) -> None:
    text = "task: x\noutput_schema: {type: object}\nbackend: {url: 'vllm://h:1', headers: {A: b}}\n"
    spec = resolve(tmp_path / "spec.yaml", text)
    assert spec.output_schema == {"type": "object"}
    assert spec.backend == {"url": "vllm://h:1", "headers": {"A": "b"}}


def test_prompts_may_stand_in_files_beside_the_spec(tmp_path: Path) -> None:
    (tmp_path / "task.txt").write_text("\ufeffReview {path}")
    spec = resolve(tmp_path / "spec.yaml", "task: {file: task.txt}\nsystem_prompt: short\n")
    assert (spec.task, spec.system_prompt) == ("Review {path}", "short")


def test_the_command_line_goes_before_the_file(tmp_path: Path) -> None:
    assert resolve(tmp_path / "spec.yaml", "task: x\nmodel: a\n", model="b").model == "b"


def test_what_a_merge_brings_may_be_overridden(tmp_path: Path) -> None:
    text = "task: x\nbackend: &b {<<: {url: a, api_key: k}, url: b}\nextra_body: {<<: *b, url: c}\n"
    spec = resolve(tmp_path / "spec.yaml", text)
    assert (spec.backend, spec.extra_body) == ({"url": "b", "api_key": "k"}, {"url": "c", "api_key": "k"})


def test_a_path_of_inputs_is_beside_the_spec(tmp_path: Path) -> None:
    path = tmp_path / "spec.yaml"
    for inputs, expected in (
        ("rows.csv", str(tmp_path / "rows.csv")),
        ("/data/rows.csv", "/data/rows.csv"),
        ("'-'", "-"),
        ("[a, b]", None),
    ):
        path.write_text(f"task: x\ninputs: {inputs}\n")
        assert read_specfile(path).inputs_path() == expected
