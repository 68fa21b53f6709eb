"""What a pool gives for every prompt: an answer, or why there is none. A fault is a value here, never an exception."""

from __future__ import annotations

from dataclasses import dataclass

from batch_agent.errors import BackendError, JobError
from batch_agent.messages import Usage


@dataclass
class Response:
    """``usage`` of a prompt that went out in a list is its share of the list's, by length: the sum is exact.
    ``finish_reason`` is ``length`` where the answer was cut. ``latency`` is the seconds of the request that was
    answered, ``attempts`` how many were sent, ``parsed`` the text as a value of ``schema=``."""

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
        # No fields: two equal answers are equal wherever they stood in a list, and however they failed.
        self.index = -1  # which prompt of its call it answers
        self.fault: JobError | None = None  # the error that ``error`` tells of, where nothing came

    @classmethod
    def failed(cls, fault: JobError, agent_index: int = -1, attempts: int = 0) -> Response:
        response = cls(False, "", str(fault) or fault.type, agent_index, attempts=attempts)
        if isinstance(fault, BackendError):
            response.text, response.usage = fault.text, fault.usage
        response.fault = fault
        return response
