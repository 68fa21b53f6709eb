"""Keeps a dispatcher up to date with the servers of its backend, which may join and leave."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

from batch_agent.backends.base import Backend, total_inflight
from batch_agent.dispatch.dispatcher import Dispatcher
from batch_agent.scheduler.server_state import ServerState


class Following:
    """Listens to the backend for one dispatcher."""

    def __init__(self, backend: Backend, dispatcher: Dispatcher) -> None:
        self._backend, self._dispatcher = backend, dispatcher
        self._models: set[str] = set()

    def use(self, models: Iterable[str]) -> None:
        """Add models that are requested. Servers known to serve only other models are not used."""
        self._models.update(models)
        self.changed()

    def changed(self) -> None:
        dispatcher = self._dispatcher
        known = {endpoint.name: endpoint for endpoint in dispatcher.scheduler.endpoints}
        servers = self._useful(self._backend.servers)
        for name, server in servers.items():
            endpoint = known.get(name)
            if endpoint is None:
                dispatcher.add(name, server)
            else:
                dispatcher.retune(endpoint)  # its weight, models or context may have changed
        for name, endpoint in known.items():
            if name not in servers and not endpoint.leaving:
                dispatcher.leave(endpoint)
        total = None if dispatcher.terms.given else total_inflight(servers.values())
        if total is not None:
            dispatcher.grow(total)
        dispatcher.slots.look_ahead()

    def _useful(self, servers: Mapping[str, ServerState]) -> Mapping[str, ServerState]:
        useful = {
            name: server for name, server in servers.items() if server.models is None or self._models & server.models
        }
        if any(server.models is not None for server in useful.values()):
            return useful
        # No server lists the models. A server may serve more than it lists, but not more than the user states.
        return {name: server for name, server in servers.items() if name in useful or not server.stated} or servers


@contextmanager
def following(backend: Backend, dispatcher: Dispatcher) -> Iterator[Following | None]:
    """Follow the backend's servers; yields None if they cannot change. The first of several runs that share a
    dispatcher follows for all of them."""
    if not backend.is_fleet or dispatcher.follower is not None:
        yield dispatcher.follower
        return
    dispatcher.follower = follower = Following(backend, dispatcher)
    backend.join(follower)
    try:
        yield follower
    finally:
        dispatcher.follower = None
        backend.leave(follower)
