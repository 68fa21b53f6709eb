"""The endpoints of a backend as a limiter knows them, and a limiter that follows those that come and go."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from batch_agent.backends.base import Backend, Member, total_inflight
from batch_agent.dispatch.limiter import Limiter
from batch_agent.scheduler.endpoint import Endpoint, Terms


def endpoints_of(backend: Backend, terms: Terms, *, given: bool = False) -> list[Endpoint]:
    """``given``: the user named ``max_inflight``, and any endpoint may have as many; else each has its own number."""
    return [_endpoint(member, terms, given=given) for member in backend.members]


def _endpoint(member: Member, terms: Terms, *, given: bool) -> Endpoint:
    if not given and member.inflight is not None:
        terms = replace(terms, ceiling=member.inflight, start=None)
    endpoint = terms.endpoint(member.name)
    endpoint.weight, endpoint.models, endpoint.context = member.weight, member.models, member.context
    return endpoint


class Following:
    """A Party to its backend, for one limiter."""

    def __init__(self, backend: Backend, limiter: Limiter, *, given: bool) -> None:
        self._backend, self._limiter, self._given = backend, limiter, given
        self._models: set[str] = set()

    def use(self, models: Iterable[str]) -> None:
        """These are asked for too: members that are known to serve only others are none of ours."""
        self._models.update(models)
        self.changed()

    def want(self, slots: float) -> None:
        self._backend.want(self, slots)

    @property
    def slots(self) -> int | None:
        return self._limiter.max_inflight

    def changed(self) -> None:
        scheduler = self._limiter.scheduler
        known = {endpoint.name: endpoint for endpoint in scheduler.endpoints}
        members = {member.name: member for member in self._useful(self._backend.members)}
        for member in members.values():
            endpoint = known.get(member.name)
            if endpoint is None:
                scheduler.add(_endpoint(member, self._limiter.terms, given=self._given))
            else:
                self._update(endpoint, member)
        for name, endpoint in known.items():
            if name not in members and not endpoint.leaving:
                scheduler.leave(endpoint)
        total = None if self._given else total_inflight(list(members.values()))
        if total is not None:
            self._limiter.grow(total)
        self._limiter.look_ahead()

    def _update(self, endpoint: Endpoint, member: Member) -> None:
        """Takes over what has changed: a hostfile may give a server another weight, model or context."""
        if endpoint.weight != member.weight and member.inflight is not None and not self._given:
            endpoint.capacity.resize(member.inflight)
        now = member.weight, member.models, member.context
        if now != (endpoint.weight, endpoint.models, endpoint.context):
            endpoint.weight, endpoint.models, endpoint.context = now
            self._limiter.scheduler.touch(endpoint)

    def _useful(self, members: Sequence[Member]) -> Sequence[Member]:
        useful = [member for member in members if member.models is None or self._models & member.models]
        some_say_so = any(member.models is not None for member in useful)
        return useful if some_say_so else members

    def share(self, slots: int | None) -> None:
        self._limiter.share(slots)


@contextmanager
def following(backend: Backend, limiter: Limiter, *, given: bool) -> Iterator[Following | None]:
    """While it is used. The first of several runs that share a limiter follows for all of them."""
    if not backend.is_fleet or limiter.party is not None:
        yield limiter.party
        return
    limiter.party = party = Following(backend, limiter, given=given)
    backend.join(party)
    try:
        yield party
    finally:
        limiter.party = None
        backend.leave(party)
