"""Client requests as questions to the models: reading them, sending them, and what a refusal becomes.

A model that refuses a request is no sign of a bad server. Here the refusal is an answer, so that bad requests of one
client do not stop the requests of others.
"""

from __future__ import annotations

import secrets
import time

from batch_agent.backends.base import ModelRequest
from batch_agent.dispatch.dispatcher import ModelCall
from batch_agent.errors import BackendError, ContextOverflow, JobError, RateLimited, Rejected, Timeout
from batch_agent.gateway.client_request import BadRequest, ClientDialect, ClientRequest, Envelope, RequestReader
from batch_agent.messages import JsonObject, Reply, Sealed
from batch_agent.serve.models import ServedModels

REFUSED = "refusal"  # the finish reason and the seal of an answer that is a refusal
OPERATORS = frozenset({401, 402, 403, 407, 408, 409, 425, 429})  # statuses that the operator must deal with
PRIORITY = 1000  # of lines, on an engine that schedules by priority: above any number of turns


def read_request(
    reader: RequestReader, models: ServedModels, dialect: ClientDialect, body: JsonObject
) -> ClientRequest:
    """Return a client's request. Raises BadRequest if it is wrong, or if the model's backend cannot represent it."""
    asked = reader.read(dialect, body, "")
    model = asked.shape.model
    if not model:
        raise BadRequest("you must provide a model parameter", "model")
    if asked.lost:
        served = models.of(model)
        if dialect.wire not in served.backend.wires:
            lost = "; ".join(dict.fromkeys(asked.lost))
            raise BadRequest(
                f"the backend of the model {model!r} has another wire format, which cannot represent: {lost}"
            )
    return asked


class ClientCall(ModelCall):
    """A client's request. Its own token limit may cut the answer; its refusal is an answer."""

    __slots__ = ()

    async def send(self, endpoint: str) -> Reply:
        try:
            return await super().send(endpoint)
        except Rejected as error:
            status = error.status
            overflow = isinstance(error, ContextOverflow)
            if not overflow and (status is None or status in OPERATORS or not 400 <= status < 500):
                raise
            return refusal(status or 400, str(error))

    def again(self) -> ClientCall:
        return ClientCall(self.backend, super().again().request)


def refusal(status: int, message: str) -> Reply:
    document: JsonObject = {"status": status, "message": message}
    return Reply(message, finish_reason=REFUSED, sealed=Sealed(REFUSED, document))


def refused(reply: Reply) -> tuple[int, str] | None:
    """Return status and message of an answer that is a refusal."""
    sealed = reply.sealed
    if sealed is None or sealed.wire != REFUSED or not isinstance(sealed.value, dict):
        return None
    return int(str(sealed.value["status"])), str(sealed.value["message"])


def model_request(asked: ClientRequest, request: ModelRequest, *, priority: int = 0) -> ModelRequest:
    """Fill a request with what a client asks."""
    request.shape, request.client, request.priority = asked.shape, asked.client_body, priority
    return request


def envelope(asked: ClientRequest, name: str = "") -> Envelope:
    """Return what an answer has beside the model's text. ``name`` is unique to the request; "": a new one."""
    return Envelope(name or secrets.token_hex(12), int(time.time()), asked.shape.model)


def start_nothing(call: object) -> None:
    """Do nothing with a tool call: the client runs it."""


def status_of(error: JobError) -> int:
    """Return the status for a request that failed."""
    match error:
        case Timeout():
            return 504
        case RateLimited():
            return 429
        case BackendError() if error.status is not None and 400 <= error.status < 600:
            return 503 if error.status in OPERATORS else error.status
        case BackendError():
            return 503
    return 500
