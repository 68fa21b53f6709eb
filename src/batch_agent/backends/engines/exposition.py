"""Prometheus's text form, read for the few numbers that are wanted of the thousands an engine tells. Pure.

A server is asked every second or so, and its text is mostly the buckets of histograms: lines of other names are passed
over without being taken apart, and lines that cannot be read are left out.
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
        """Over all labels, under the first of the names that is there; None where none is."""
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
        """``total`` of what is counted in whole numbers."""
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
        if value - value == 0:  # neither infinite nor not a number
            pairs = _LABEL.findall(labels)
            yield name, Sample(value, {label: _ESCAPED.sub(_unescape, text) for label, text in pairs})


def _unescape(escaped: re.Match[str]) -> str:
    return "\n" if escaped[1] == "n" else escaped[1]
