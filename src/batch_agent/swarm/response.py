"""What a pool returns for every prompt: an answer, or an error as a value instead of an exception."""

from __future__ import annotations

from dataclasses import dataclass

from batch_agent.errors import BackendError, JobError
from batch_agent.messages import Usage


@dataclass
class Response:
    """``usage`` of a prompt in a list is its share of the list's usage, by length; the sum is exact. ``finish_reason``
    is ``length`` for a cut answer. ``latency`` is the seconds of the answered request, ``attempts`` the number of
    requests, ``parsed`` the text as a value of ``schema=``."""

    success: bool
    text: str
    error: str | None = None
    agent_index: int = -1
    usage: Usage | None = None
    finish_reason: str | None = None
    latency: float | None = None
    attempts: int = 0
    parsed: object = None

    def __post_init__(self) -> None:
        # Not dataclass fields: equal answers compare equal wherever they were in a list, and however they failed.
        self.index = -1  # of its prompt in the call
        self.fault: JobError | None = None  # the error behind ``error``, if there is no answer

    @classmethod
    def failed(cls, fault: JobError, agent_index: int = -1, attempts: int = 0) -> Response:
        response = cls(False, "", str(fault) or fault.type, agent_index, attempts=attempts)
        if isinstance(fault, BackendError):
            response.text, response.usage = fault.text, fault.usage
        response.fault = fault
        return response
