"""The names users rely on."""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
import sysconfig
import tomllib
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

import batch_agent
from batch_agent import AgentError, BatchSpec, SpecError, Success, errors
from batch_agent.options import EveryOption
from batch_agent.spec import OLD_NAMES

ROOT = Path(__file__).parent.parent

PUBLIC = [
    "AgentContext",
    "AgentError",
    "AgentReply",
    "AgentResult",
    "BatchAgent",
    "BatchAgentError",
    "BatchSpec",
    "BlockingContext",
    "Failure",
    "Fleet",
    "Image",
    "JobError",
    "Message",
    "Pipeline",
    "Results",
    "RunRejected",
    "RunUnreachable",
    "SpecError",
    "StoreError",
    "Success",
    "Timings",
    "Tool",
    "ToolCall",
    "ToolContext",
    "ToolError",
    "Usage",
    "__version__",
    "compare",
    "release_models",
]

ERROR_TYPES = {
    "BackendError",
    "BadArguments",
    "BadResponse",
    "Cancelled",
    "ContextOverflow",
    "InputError",
    "Interrupted",
    "Invalid",
    "JobError",
    "LimitExceeded",
    "NotJSON",
    "OVERSIZED",
    "OutcomeUnknown",
    "OutputError",
    "RateLimited",
    "RecordUnreadable",
    "Rejected",
    "ReplayMismatch",
    "TimeoutError",
    "ToolError",
    "ToolFailed",
    "ToolTimeout",
    "Truncated",
    "Unavailable",
    "UnknownTool",
    "WorkerFailed",
}


def test_the_public_names_are_these() -> None:
    assert batch_agent.__all__ == sorted(PUBLIC)
    assert all(getattr(batch_agent, name) is not None for name in PUBLIC)


def test_the_error_types_are_these_and_all_documented() -> None:
    classes = [value for value in vars(errors).values() if isinstance(value, type)]
    kinds = {value.type for value in classes if issubclass(value, errors.JobError)}
    assert kinds == ERROR_TYPES
    documented = (ROOT / "docs" / "errors.md").read_text()
    assert [kind for kind in sorted(kinds) if f"`{kind}`" not in documented] == []


def test_a_wrong_error_type_is_answered_with_the_types_that_the_documentation_gives_for_results() -> None:
    with pytest.raises(SpecError) as refused:
        BatchSpec(task="{input}", inputs=["a"], run_dir="run", resume=True, retry_failed="Foo")
    listed = str(refused.value).rpartition("rows fail with ")[2].split(", ")
    documented = re.findall(r"^\| `(\w+)` \| \w+", (ROOT / "docs" / "errors.md").read_text(), re.MULTILINE)
    assert ERROR_TYPES.intersection(listed) == ERROR_TYPES.intersection(documented)


def test_the_typed_options_are_those_of_the_spec() -> None:
    typed = set(EveryOption.__annotations__) | {"output_schema"}
    assert typed == set(BatchSpec.model_fields) | set(OLD_NAMES)


def test_results_have_the_fields_that_are_promised() -> None:
    fields = "index job_id input ok output error attempts turns usage cost timings messages raw_text"
    assert set(fields.split()) <= {field.name for field in dataclasses.fields(Success)}
    assert {"stage", "type", "message", "retryable"} <= set(AgentError.__dataclass_fields__)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"max_inflight": 0}, r"max_inflight: must be a whole number above 0, or None for no limit \(got 0\)"),
        ({"max_turns": -1}, "a whole number above 0"),
        ({"processes": 0}, r"processes: must be a whole number above 0, or \"auto\" for one per core \(got 0\)"),
        ({"timeout_per_agent": 0}, "timeout_per_agent: must be a number of seconds above 0, or None for no limit"),
        ({"timeout_per_agent": True}, r"got True"),
        ({"max_inflight": "4"}, r"got text"),
        ({"max_retries": None}, "max_retries: must be a whole number, 0 or more: without a limit"),
        ({"temperature": -0.1}, "temperature: must be a number from 0 to 10"),
        ({"temperature": True}, r"got True"),
        ({"stop": ["a", 5]}, "stop: must be a text or a list of texts"),
        ({"model": " "}, "model is empty"),
        ({"max_inflght": 4}, "did you mean 'max_inflight'"),
        ({"nonsense": 1}, "Options: "),
        ({"model_max_context": 100, "min_response_tokens": 200}, "larger than min_response_tokens"),
        ({"task": "  "}, "task is empty"),
        ({"max_cost": 0}, "max_cost: must be a number of dollars above 0"),
        ({"max_total_tokens": 1.5}, "max_total_tokens: must be a whole number"),
        ({"max_wall_time": float("inf")}, "max_wall_time: must be a number of seconds"),
        ({"prices": {"input": "cheap"}}, "prices: must be a mapping from names to numbers"),
        ({"cache": 3.5}, "cache: "),
        ({"backend": "vllm://a", "runtime": object()}, "give one of them"),
    ],
)
def test_a_wrong_option_is_a_spec_error_that_says_what_is_allowed(options: dict[str, object], says: str) -> None:
    with pytest.raises(SpecError, match=says) as caught:
        BatchSpec(**({"task": "x", "inputs": []} | options))
    assert isinstance(caught.value, ValueError)


def test_every_option_is_described_and_says_what_it_may_be_and_not_what_was_given() -> None:
    secret = type("Holder", (), {"__repr__": lambda self: "sk-secret"})()
    for name, field in BatchSpec.model_fields.items():
        assert field.description, name
        if field.annotation is not Any:  # what others may be is for those to say who resolve it
            with pytest.raises(SpecError, match=rf"^{name}: must be .*\(got Holder\)$"):
                BatchSpec(**({"task": "x", "inputs": []} | {name: secret}))


def test_none_means_no_limit_and_old_names_still_work() -> None:
    spec = BatchSpec(task="x", inputs=[], max_concurrent=7, max_dispatched=None, timeout_per_turn=None)
    assert (spec.max_inflight, spec.max_agents, spec.timeout_per_turn) == (7, None, None)


def test_where_an_option_and_its_old_name_are_both_given_the_option_counts() -> None:
    for old, new in OLD_NAMES.items():
        for given in ({old: 4, new: 5}, {new: 5, old: 4}):
            words = {4: True, 5: "resend"} if new == "on_change" else {4: "4", 5: "5"}
            values = {name: value if name.startswith("max") else words[value] for name, value in given.items()}
            assert getattr(BatchSpec(task="x", inputs=[], **{"run_dir": "r", **values}), new) == values[new]


def test_a_key_is_not_in_the_representation_of_a_spec() -> None:
    assert "sk-secret" not in repr(BatchSpec(task="x", inputs=[], api_key="sk-secret"))
    for name in ("backend", "runtime"):
        for place in ("http://user:sk-secret@host/v1", {"url": "http://host/v1", "api_key": "sk-secret"}):
            assert "sk-secret" not in repr(BatchSpec(**{"task": "x", "inputs": [], name: place}))


def test_the_version_is_that_of_the_project() -> None:
    assert batch_agent.__version__ == metadata.version("batch-agent")
    for command in ([sys.executable, "-m", "batch_agent"], [str(Path(sys.executable).parent / "batch-agent")]):
        said = subprocess.run([*command, "--version"], capture_output=True, text=True, check=True).stdout
        assert batch_agent.__version__ in said


SLOW = ["aiohttp", "docstring_parser", "json_repair", "jsonschema_rs", "openvino_genai", "pyarrow", "rich", "yaml"]
OURS = ["batch_agent.backends.local", "batch_agent.backends.openai.chat", "batch_agent.backends.simulated"]


def loaded_by(*steps: str) -> list[set[str]]:
    """The modules that a fresh Python has after each of these."""
    shown = "\nimport sys; print('\\n', *sys.modules)\n"
    command = [sys.executable, "-c", "".join(step + shown for step in steps)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return [set(line.split()) for line in done.stdout.split("\n") if "sys" in line.split()]


def command(*arguments: str) -> str:
    return f"from batch_agent.cli.main import main\ntry: main({list(arguments)})\nexcept SystemExit: pass"


def test_nothing_is_imported_before_it_is_needed() -> None:
    package, version, listed, flags = loaded_by(
        "import batch_agent", command("--version"), command("--help"), command("run", "--help")
    )
    assert package.isdisjoint(["asyncio", "pydantic"])
    assert version.isdisjoint(["asyncio", "pydantic"]) and listed.isdisjoint(["asyncio", "pydantic"])
    assert flags.isdisjoint(["asyncio", *SLOW, *OURS])
    agent, names, plan = loaded_by(
        "from batch_agent import BatchAgent",
        "from batch_agent import BatchSpec, Tool",
        "BatchAgent.plan(task='x', inputs=[], backend='simulated://')",
    )
    assert agent.isdisjoint(["pydantic", "batch_agent.run", *SLOW, *OURS])
    assert names.isdisjoint(["batch_agent.run", *SLOW, *OURS])
    assert plan.isdisjoint(["aiohttp", "rich", "yaml", "batch_agent.backends.local"])


def test_every_public_name_is_where_the_package_says() -> None:
    assert set(batch_agent.__all__) <= set(dir(batch_agent))
    with pytest.raises(AttributeError, match="no attribute 'BatchAgnet'"):
        batch_agent.BatchAgnet  # type: ignore[attr-defined]  # noqa: B018


def test_a_source_tree_that_was_never_installed_can_be_used(tmp_path: Path) -> None:
    packages = tmp_path / "packages"
    packages.mkdir()
    for place in {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}:
        for path in Path(place).iterdir():
            if not path.name.startswith("batch_agent"):
                (packages / path.name).symlink_to(path)
    code = (
        "import importlib.metadata\n"
        "assert not [d for d in importlib.metadata.distributions() if d.name == 'batch-agent']\n"
        "from batch_agent import BatchAgent, __version__\n"
        "from batch_agent.cli.main import main\n"
        "BatchAgent.run_sync(task='x', inputs=['a'], backend='simulated://instant', run_dir='run')\n"
        "main(['doctor'])\n"
        "print(__version__)"
    )
    done = subprocess.run(
        [sys.executable, "-S", "-c", code],  # without the environment's own packages
        env={**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{packages}"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.splitlines()[-1:] == [batch_agent.__version__], done.stderr


def test_the_extra_all_has_the_packages_of_all_other_extras() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert sorted(extras.pop("all")) == sorted({package for packages in extras.values() for package in packages})
