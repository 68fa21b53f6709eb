"""Interactive requests go before turns, and do not wait for a slot."""

from __future__ import annotations

from batch_agent.scheduler.core import Scheduler
from batch_agent.scheduler.ordering import FIRST, AgentForecast
from batch_agent.scheduler.server import Endpoint
from batch_agent.scheduler.server_state import ServerState, Terms


def endpoints(count: int) -> list[Endpoint]:
    return [Endpoint(ServerState(str(number)), Terms(1), str(number)) for number in range(count)]


def test_an_interactive_request_goes_although_every_slot_is_taken() -> None:
    for count in (1, 2):
        scheduler = Scheduler(count, None, endpoints(count))
        for _ in range(count + 2):
            scheduler.request(AgentForecast(), 0, 0.0)
        for _ in range(count):
            assert scheduler.grant(0.0) is not None
        assert scheduler.grant(0.0) is None
        ticket = scheduler.request(AgentForecast(FIRST), FIRST, 0.0)
        slot = scheduler.grant(0.0)
        assert slot is not None and slot.ticket is ticket and scheduler.waiting == 2
        assert scheduler.grant(0.0) is None
        scheduler.give_back(slot)
        assert scheduler.grant(0.0) is None  # it took no slot of the others


def test_an_interactive_request_goes_to_an_endpoint_of_its_model() -> None:
    one, other = endpoints(2)
    one.server.models, other.server.models = frozenset({"a"}), frozenset({"b"})
    scheduler = Scheduler(None, None, [one, other])
    for model, endpoint in (("a", one), ("b", other)):
        scheduler.request(AgentForecast(FIRST, model=model), FIRST, 0.0)
        slot = scheduler.grant(0.0)
        assert slot is not None and slot.endpoint is endpoint
