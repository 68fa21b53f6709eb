"""The names users rely on."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path
from typing import get_type_hints

import pytest

import batch_agent
from batch_agent import AgentError, AgentResult, BatchSpec, SpecError, errors
from batch_agent.api import Options
from batch_agent.spec import OLD_NAMES

ROOT = Path(__file__).parent.parent

PUBLIC = [
    "AgentError",
    "AgentResult",
    "BatchAgent",
    "BatchAgentError",
    "BatchSpec",
    "JobError",
    "Message",
    "RunRejected",
    "SpecError",
    "StoreError",
    "Timings",
    "Tool",
    "ToolCall",
    "ToolError",
    "Usage",
    "__version__",
]

ERROR_TYPES = {
    "BackendError",
    "BadArguments",
    "BadResponse",
    "ContextOverflow",
    "InputError",
    "Interrupted",
    "Invalid",
    "JobError",
    "LimitExceeded",
    "NotJSON",
    "OVERSIZED",
    "OutputError",
    "RateLimited",
    "Rejected",
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


def test_the_typed_options_are_those_of_the_spec() -> None:
    typed = set(get_type_hints(Options)) | {"output_schema"}
    assert typed == set(BatchSpec.model_fields) | set(OLD_NAMES)


def test_every_option_is_described_and_in_the_reference() -> None:
    reference = (ROOT / "docs" / "options.md").read_text()
    for name, field in BatchSpec.model_fields.items():
        assert field.description, name
        assert f"`{name}`" in reference, f"docs/options.md does not mention {name}"


@pytest.mark.parametrize("name", ["AgentResult", "AgentError"])
def test_results_have_the_fields_that_are_promised(name: str) -> None:
    fields = {
        "AgentResult": "index job_id input ok output error attempts turns usage cost timings messages raw_text",
        "AgentError": "stage type message retryable",
    }
    kind = {"AgentResult": AgentResult, "AgentError": AgentError}[name]
    assert set(fields[name].split()) <= set(kind.__dataclass_fields__)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"max_inflight": 0}, r"max_inflight: must be a whole number above 0, or None for no limit \(got 0\)"),
        ({"max_turns": -1}, "a whole number above 0"),
        ({"timeout_per_agent": 0}, "timeout_per_agent: must be a number of seconds above 0, or None for no limit"),
        ({"timeout_per_agent": True}, r"got True"),
        ({"max_inflight": "4"}, r"got text"),
        ({"max_retries": None}, "max_retries: must be a whole number, 0 or more: without a limit"),
        ({"temperature": -0.1}, "temperature: must be a number from 0 to 10"),
        ({"temperature": True}, r"got True"),
        ({"stop": ["a", 5]}, "stop: must be a text or a list of texts"),
        ({"model": " "}, "model is empty"),
        ({"max_inflght": 4}, "did you mean 'max_inflight'"),
        ({"max_concurrent": 4, "max_inflight": 5}, "old name"),
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


FREE = {"inputs", "output_schema", "backend", "runtime"}  # what these may be is for others to say


@pytest.mark.parametrize("name", sorted(BatchSpec.model_fields.keys() - FREE))
def test_every_option_says_what_it_may_be_and_not_what_was_given(name: str) -> None:
    secret = type("Holder", (), {"__repr__": lambda self: "sk-secret"})()
    with pytest.raises(SpecError, match=rf"^{name}: must be .*\(got Holder\)$"):
        BatchSpec(**({"task": "x", "inputs": []} | {name: secret}))


def test_none_means_no_limit_and_old_names_still_work() -> None:
    spec = BatchSpec(task="x", inputs=[], max_concurrent=7, max_dispatched=None, timeout_per_turn=None)
    assert (spec.max_inflight, spec.max_agents, spec.timeout_per_turn) == (7, None, None)


def test_a_key_is_not_in_the_representation_of_a_spec() -> None:
    assert "sk-secret" not in repr(BatchSpec(task="x", inputs=[], api_key="sk-secret"))
    for name in ("backend", "runtime"):
        for place in ("http://user:sk-secret@host/v1", {"url": "http://host/v1", "api_key": "sk-secret"}):
            assert "sk-secret" not in repr(BatchSpec(**{"task": "x", "inputs": [], name: place}))


def test_the_version_is_that_of_the_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert batch_agent.__version__ == project["version"]
    for command in ([sys.executable, "-m", "batch_agent"], [str(Path(sys.executable).parent / "batch-agent")]):
        said = subprocess.run([*command, "--version"], capture_output=True, text=True, check=True).stdout
        assert project["version"] in said
