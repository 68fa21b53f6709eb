"""A row with samples: agents that answer the same question, whose answers vote (``trust.votes``).

Each sample is an agent with its own record, under its own key. The first sample has the key of the row. The worker
starts the samples, and asks this module which more are needed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

from pydantic import JsonValue

from batch_agent.agent.agent import Agent
from batch_agent.compiler.schema import OutputSchema
from batch_agent.errors import JobError, OutputError, WorkerFailed
from batch_agent.files.results import from_json, plainly, to_json
from batch_agent.foreign import describe, traceback_of
from batch_agent.job import AgentError, AgentResult, Job, is_interrupted
from batch_agent.messages import JsonObject
from batch_agent.record.keys import asked_of, derived, sample_mark
from batch_agent.record.store import Identity
from batch_agent.run.parts import Several
from batch_agent.trust.votes import FAILED, PENDING, Outcome, Vote, VoteError, Voting


def identity_of(row: Identity, number: int) -> Identity:
    """Return the identity of a sample. The first sample has that of its row; those of the others do not depend on the
    row's id."""
    if not number:
        return row
    return Identity(derived(asked_of(row.key), sample_mark(number)), derived(row.row, sample_mark(number)))


def samples_of(row: Identity, count: int) -> list[Identity]:
    """Return the identities of the samples of a row."""
    return [identity_of(row, number) for number in range(count)]


class Samples(Several):
    def __init__(self, job: Job, voting: Voting, schema: OutputSchema[object] | None) -> None:
        super().__init__(job)
        self._voting, self._schema = voting, schema
        self._results: list[AgentResult[object] | None] = []  # of the samples that were asked; None: it works
        self._outcomes: list[Outcome] = []
        self._stopped = False
        self._agents: dict[int, Agent] = {}  # those that work, by the numbers of their samples

    def next(self) -> int | None:
        """Count the next sample as asked, and return its number; None if no more is needed now."""
        if self._stopped or self.error is not None or self._voting.needed(self._outcomes) <= len(self._outcomes):
            return None
        self._results.append(None)
        self._outcomes.append(PENDING)
        return len(self._outcomes) - 1

    def job_of(self, number: int, key: bytes) -> Job:
        """Return the job of a sample. ``key`` identifies the row. It does not depend on the row's id, so that a changed
        id changes no seed."""
        seed = self._voting.seed_of(number, asked_of(key))
        return replace(self.job, job_id=f"{self.job.job_id}#{number + 1}", seed=seed)

    def begin(self, number: int, agent: Agent) -> None:
        self._agents[number] = agent

    def stop(self, error: JobError) -> None:
        """End the row now with this error: its agents end, and no more samples are asked."""
        self._stopped = True
        self.error = AgentError.of(error)
        for agent in self._agents.values():
            agent.stop(error)

    def shown(self) -> JsonObject:
        """Return the conversation of the first sample that is being asked."""
        return self._agents[min(self._agents)].shown()

    def end(self, number: int, result: AgentResult[object]) -> None:
        """Note the end of a sample. An interrupted one has no outcome, and no more samples are asked."""
        del self._agents[number]
        plain = plainly(result, self._schema)
        self._results[number] = result if plain.ok else plain
        self._outcomes[number] = cast(JsonValue, from_json(to_json(plain.output))) if plain.ok else FAILED
        if is_interrupted(result):
            self._stopped = True
            self.error = self.error or result.error

    @property
    def works(self) -> bool:
        return bool(self._agents)

    @property
    def is_done(self) -> bool:
        return PENDING not in self._outcomes

    @property
    def asked(self) -> int:
        return len(self._outcomes)

    @property
    def spared(self) -> int:
        """The number of samples that were not needed."""
        return self._voting.samples - self.asked

    @property
    def are_identical(self) -> bool:
        """Return whether there are several answers, and all are the same."""
        known = [outcome for outcome in self._outcomes if outcome is not FAILED]
        return len(known) > 1 and len({to_json(outcome) for outcome in known}) == 1

    def result(self) -> AgentResult[object]:
        """Return the result of the row, also before its end."""
        results = [result for result in self._results if result is not None]
        if self.error is None and self._voting.has_failed(self._outcomes):
            self.error = self._too_few()
        last = next((result for result in reversed(results) if result.ok), results[-1] if results else None)
        if self.error is None:
            try:
                return self._voted(results)
            except JobError as error:
                self.fail(error)
        return cast("AgentResult[object]", self.summed(results, last))

    def _voted(self, results: Sequence[AgentResult[object]]) -> AgentResult[object]:
        votes = self._votes()
        number, answer = self._voting.combined(self._outcomes, votes)
        best = self._results[number]
        assert best is not None
        output = best.output if answer == self._outcomes[number] else self._read(answer, best.output)
        result: Any = replace(self.summed(results, best), output=output)
        result.votes = {name: vote.shown() for name, vote in votes.items()}
        result.samples = tuple(each.output for each in results)
        if best.doubts is not None:
            result.doubts = self._doubts(best, votes)
        return cast("AgentResult[object]", result)

    def _doubts(self, best: AgentResult[object], votes: Mapping[str, Vote]) -> dict[str, float | None]:
        """Return the doubts of the samples that have the winners; if a sample has none, the doubts of the votes."""
        doubts = dict(best.doubts or {})
        for name, vote in votes.items():
            place = self._voting.first_with(name, vote.winner, self._outcomes)
            sample = None if place is None else self._results[place]
            known = None if sample is None else (sample.doubts or {}).get(name)
            doubts[name] = vote.doubt if known is None else known
        return doubts

    def _votes(self) -> dict[str, Vote]:
        try:
            return self._voting.votes(self._outcomes)
        except VoteError as error:
            cause = error.__cause__ or error
            failed = WorkerFailed(f"{error}: {describe(cause)}")
            failed.traceback = traceback_of(cause)
            raise failed from None

    def _read(self, answer: JsonValue, other: object) -> object:
        """Return the winners as a value of the schema. ``other``: the output of the sample that agrees with most
        winners, if the schema does not allow them together."""
        if self._schema is None:
            return answer
        try:
            return self._schema.read_back(to_json(answer))
        except OutputError:
            return other

    def _too_few(self) -> AgentError:
        """Return the error of a row with too few answers: that of the first sample that failed."""
        failed = [result.error for result in self._results if result is not None and result.error is not None]
        first = failed[0]
        return replace(first, message=f"{len(failed)} of {self._voting.samples} samples failed; {first.message}")
