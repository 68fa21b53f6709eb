"""The endpoints of a backend as a limiter knows them, and a limiter that follows those that come and go."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

from batch_agent.backends.base import Backend, Many, Member
from batch_agent.engine.limiter import Limiter
from batch_agent.scheduler.endpoint import Endpoint


def endpoints_of(backend: Backend, max_inflight: int | None, *, given: bool = False) -> list[Endpoint]:
    """``given``: the user named ``max_inflight``, and any endpoint may have as many; else each has its own number."""
    able = backend.capabilities
    if not able.many:
        return [Endpoint(name, max_inflight) for name in able.endpoints]
    return [_endpoint(member, max_inflight, given=given) for member in cast(Many, backend).members]


def _endpoint(member: Member, max_inflight: int | None, *, given: bool) -> Endpoint:
    ceiling = max_inflight if given else member.inflight
    return Endpoint(member.name, ceiling, weight=member.weight, models=member.models, context=member.context)


class Following:
    """A Party to its backend, for one limiter."""

    def __init__(self, backend: Many, limiter: Limiter, *, given: bool) -> None:
        self._backend, self._limiter, self._given = backend, limiter, given

    @property
    def slots(self) -> int | None:
        return self._limiter.max_inflight

    def changed(self) -> None:
        scheduler = self._limiter.scheduler
        known = {endpoint.name: endpoint for endpoint in scheduler.endpoints}
        members = {member.name: member for member in self._backend.members}
        for member in members.values():
            endpoint = known.get(member.name)
            if endpoint is None:
                scheduler.add(_endpoint(member, self._limiter.max_inflight, given=self._given))
            elif endpoint.models != member.models:
                endpoint.models = member.models
                scheduler.touch(endpoint)
        for name, endpoint in known.items():
            if name not in members and not endpoint.leaving:
                scheduler.leave(endpoint)
        if not self._given:
            self._limiter.grow(sum(member.inflight for member in members.values()))
        self._limiter.look_ahead()

    def share(self, slots: int | None) -> None:
        self._limiter.share(slots)


@contextmanager
def following(backend: Backend, limiter: Limiter, *, given: bool) -> Iterator[None]:
    """While it is used. The first of several runs that share a limiter follows for all of them."""
    if not backend.capabilities.many or limiter.on_want is not None:
        yield
        return
    many = cast(Many, backend)
    party = Following(many, limiter, given=given)
    limiter.on_want = lambda slots: many.want(party, slots)
    many.join(party)
    party.changed()
    try:
        yield
    finally:
        limiter.on_want = None
        many.leave(party)
