"""The targets of ``make soak``, for a moment: every entry of their corpora, and a few inputs made of these."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from tests.examples import examples
from tests.fuzz.inputs import inputs
from tests.fuzz.targets import CORPUS, EXAMPLES, TARGETS, corpus


def test_every_target_has_a_corpus_and_every_corpus_a_target() -> None:
    assert {path.name for path in CORPUS.iterdir()} == TARGETS.keys()
    assert all(corpus(name) for name in TARGETS)


@pytest.mark.parametrize("name", TARGETS)
def test_what_once_failed_does_not_fail_again(name: str) -> None:
    for entry in corpus(name):
        TARGETS[name](entry)


@pytest.mark.parametrize("name", TARGETS)
def test_any_bytes_are_read_or_refused(name: str) -> None:
    @given(inputs(name))
    @settings(max_examples=examples(EXAMPLES.get(name, 100)), database=None, suppress_health_check=list(HealthCheck))
    def holds(data: bytes) -> None:
        TARGETS[name](data)

    holds()
