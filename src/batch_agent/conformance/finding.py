"""The values of an examination: a question, its finding, and the report of all findings. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import groupby
from typing import Literal

from batch_agent.messages import JsonObject, Usage

Status = Literal["works", "emulated", "missing", "unclear", "not asked"]
STATUSES: Mapping[Status, str] = {
    "works": "the server does it",
    "emulated": "the server does not; Batch Agent does it instead",
    "missing": "the server does not do it",
    "unclear": "the answer does not show it",
    "not asked": "the question does not apply, or the time was over",
}


@dataclass(frozen=True, slots=True)
class Finding:
    status: Status
    note: str = ""
    flag: str = ""  # what would help, if the server lacks something


works = partial(Finding, "works")
emulated = partial(Finding, "emulated")
missing = partial(Finding, "missing")
unclear = partial(Finding, "unclear")
not_asked = partial(Finding, "not asked")


@dataclass(frozen=True, slots=True)
class Answered:
    """One question of an examination with its finding."""

    id: str
    group: str
    text: str
    finding: Finding
    seconds: float = 0.0
    requests: int = 0

    def to_json(self) -> JsonObject:
        asked: JsonObject = {"id": self.id, "group": self.group, "question": self.text}
        return {**asked, **asdict(self.finding), "seconds": round(self.seconds, 3), "requests": self.requests}


@dataclass(frozen=True, slots=True)
class Report:
    """What a server was found to do. It names the server without credentials, so it can go into a bug report."""

    backend: str
    engine: str  # name and version, as far as the server reports them
    model: str
    answers: Sequence[Answered]
    seconds: float
    requests: int
    usage: Usage
    date: str
    about: Mapping[str, str] = field(default_factory=dict)  # versions of this package and of Python

    @property
    def counts(self) -> dict[str, int]:
        found = Counter(answer.finding.status for answer in self.answers)
        return {status: found[status] for status in STATUSES}

    @property
    def answers_at_all(self) -> bool:
        return any(answer.id == "plain" and answer.finding.status == "works" for answer in self.answers)

    def to_json(self) -> JsonObject:
        return {
            "backend": self.backend,
            "engine": self.engine,
            "model": self.model,
            "date": self.date,
            **self.about,
            "counts": {**self.counts},
            "seconds": round(self.seconds, 1),
            "requests": self.requests,
            "prompt_tokens": self.usage.prompt_tokens,
            "answer_tokens": self.usage.completion_tokens,
            "answers": [answer.to_json() for answer in self.answers],
        }

    def lines(self) -> Iterator[str]:
        yield f"{self.backend}: {self.engine}, model {self.model}, {self.date}"
        width = max((len(answer.text) for answer in self.answers), default=0)
        for group, answers in groupby(self.answers, key=lambda answer: answer.group):
            yield group
            for answer in answers:
                finding = answer.finding
                flag = f" -> {finding.flag}" if finding.flag else ""
                yield f"  {finding.status:<9} {answer.text:<{width}}  {finding.note}{flag}".rstrip()
        counted = ", ".join(f"{count} {status}" for status, count in self.counts.items() if count)
        tokens = f"{self.usage.prompt_tokens:,} prompt and {self.usage.completion_tokens:,} answer tokens"
        yield f"{counted}; {self.requests} requests, {tokens}, {self.seconds:.0f} s"
