"""What docs/coming-from.md calls missing is missing."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from batch_agent import BatchAgent
from batch_agent.backends.schemes import SCHEMES
from batch_agent.spec import OLD_NAMES, BatchSpec

PAGE = Path(__file__).parent.parent / "docs" / "coming-from.md"
MISSING = re.compile(r"^\| (.+?) \| not there\b", re.MULTILINE)
NAME = re.compile(r"`(\w+)(?:\(\)|://)?`")


def missing() -> list[str]:
    return [name[1] for row in MISSING.findall(PAGE.read_text()) for name in NAME.finditer(row)]


def test_the_page_calls_something_missing() -> None:
    assert len(missing()) > 5


@pytest.mark.parametrize("name", missing())
def test_what_is_called_missing_is_missing(name: str) -> None:
    assert name not in {*BatchSpec.model_fields, *OLD_NAMES, *SCHEMES}
    assert not hasattr(BatchAgent, name)
