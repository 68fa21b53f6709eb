"""Reads the few needed values from Prometheus text. Pure.

A server is polled about once a second, and most of its text is histogram buckets. So lines of other metrics are skipped
without parsing, and unreadable lines are ignored.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_ESCAPED = re.compile(r"\\(.)")


@dataclass(frozen=True, slots=True)
class Sample:
    value: float
    labels: Mapping[str, str]


class Exposition:
    def __init__(self, text: str, names: Collection[str]) -> None:
        self._samples: dict[str, list[Sample]] = {}
        for name, sample in _read(text, names):
            self._samples.setdefault(name, []).append(sample)

    def samples(self, name: str) -> list[Sample]:
        return self._samples.get(name, [])

    def total(self, *names: str) -> float | None:
        """Return the sum over all labels, for the first of the names that exists; None if none does."""
        for name in names:
            if samples := self.samples(name):
                return sum(sample.value for sample in samples)
        return None

    def mean(self, *names: str) -> float | None:
        for name in names:
            if samples := self.samples(name):
                return sum(sample.value for sample in samples) / len(samples)
        return None

    def count(self, *names: str) -> int | None:
        """Return ``total`` as an integer."""
        total = self.total(*names)
        return None if total is None else int(total)


def _read(text: str, names: Collection[str]) -> Iterator[tuple[str, Sample]]:
    for line in text.splitlines():
        name = re.split(r"[{\s]", line, maxsplit=1)[0]
        if name not in names:
            continue
        rest = line[len(name) :]
        labels, brace, behind = rest.rpartition("}")
        try:
            value = float((behind if brace else rest).split()[0])
        except (ValueError, IndexError):
            continue
        if value - value == 0:  # finite
            pairs = _LABEL.findall(labels)
            yield name, Sample(value, {label: _ESCAPED.sub(_unescape, text) for label, text in pairs})


def _unescape(escaped: re.Match[str]) -> str:
    return "\n" if escaped[1] == "n" else escaped[1]
