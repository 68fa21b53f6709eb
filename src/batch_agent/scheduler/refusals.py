"""Decides whether a denial (401, 403, 404 and similar) concerns one row, or every row of the run.

A wrong key concerns all rows. So does a path or a model that does not exist, if the server has never given a good
answer. After good answers a denial is first confirmed, because a gateway may deny requests by mistake, or for the
moment in which it loads its configuration. Only a request that was sent a while after the first denial arrived confirms
it: requests that were in flight together are denied together, by one mistake. If there is no good answer in between, it
concerns all rows. That is not the end: the endpoint counts as down, and is tried again (``dispatch.endpoints``).

Anything else (a bad image, a prompt that a filter refuses) may concern only the row. It is unclear until a request sent
at the same time or later gets a good answer, or until other rows are denied too. The same denial of several rows with
no such answer between them concerns all rows, unless many more requests are in flight: a denial often arrives sooner
than an answer. The same holds for a forbidden or missing thing where no control request can be sent: only such a
request can tell, at the end of a batch, that the last row is at fault.
"""

from __future__ import annotations

import re
from collections.abc import Hashable
from typing import Literal, NamedTuple

Scope = Literal["row", "confirm", "unclear", "all"]

WRONG_KEY = frozenset({401, 402, 429})  # the 429 of a spent quota; a 429 with a Retry-After is not a denial
WRONG_PLACE = frozenset({301, 302, 303, 307, 308, 404, 405})
FORBIDDEN = 403
CONFIRM_AFTER = 0.25  # seconds from the first denial until a request is sent that can confirm it
CONFIRMED = 2  # number of rows that were denied in such a request, while others are in flight
ALONE = 3  # denials of one row, while others were answered, that are the row's own fault
SEVERAL = 10  # number of rows with a status that may concern all; a moderator may refuse a few in a row
FEW = 3  # the same before any good answer, with few requests in flight
MANY = 20  # number of rows with the same message and another status

_VARIABLE = re.compile(r"\d+|'[^']*'|\"[^\"]*\"")


class Denial(NamedTuple):
    """``number`` is how often the row was denied, this denial included."""

    sent_at: float
    arrived_at: float
    number: int = 1


class Refusals:
    def __init__(self) -> None:
        self._answered = False
        self._kind: tuple[int, str] | None = None  # of the unclear denials, which all have the same kind
        self._rows: dict[Hashable, float] = {}  # row → when its request was sent
        self._denied_at: float | None = None  # arrival of the first denial that no answer has disproved

    def answered(self, sent_at: float) -> None:
        """Record a good answer to a request sent at ``sent_at``."""
        self._answered = True
        if self._rows:
            unclear = {row: sent for row, sent in self._rows.items() if sent > sent_at}
            if len(unclear) < len(self._rows) or (self._denied_at is not None and sent_at > self._denied_at):
                self._denied_at = None
            self._rows = unclear

    @property
    def has_answered(self) -> bool:
        return self._answered

    def is_unclear(self, row: Hashable) -> bool:
        return row in self._rows

    def scope(
        self,
        row: Hashable,
        status: int | None,
        message: str,
        denial: Denial,
        left_in_flight: int,
        *,
        can_ask: bool = False,
    ) -> Scope:
        """Return which rows a denial concerns. ``confirm``: send the same request again, ``CONFIRM_AFTER`` later at the
        earliest. ``can_ask``: a control request can be sent."""
        if status is None:  # a filter stopped the answer; the request itself was accepted
            return "row"
        wrong_key = status in WRONG_KEY
        if (wrong_key or status in WRONG_PLACE) and not self._answered:
            return "all"
        by_status = wrong_key or status in WRONG_PLACE or status == FORBIDDEN
        kind = (status, "" if by_status else _VARIABLE.sub("…", message))
        if kind != self._kind:
            self._kind = kind
            self._rows.clear()
        confirms = wrong_key or (can_ask and by_status and self._answered)
        if confirms and denial.number >= ALONE and row not in self._rows:
            return "row"  # other rows were answered meanwhile
        if not self._rows or self._denied_at is None:
            self._denied_at = denial.arrived_at
        self._rows[row] = denial.sent_at
        if confirms:
            confirmed = sum(sent >= self._denied_at + CONFIRM_AFTER for sent in self._rows.values())
            if confirmed >= CONFIRMED or (confirmed and not left_in_flight):
                return "all"
            return "confirm" if denial.number < ALONE else "unclear"
        refused = len(self._rows)
        if by_status and not self._answered and refused >= FEW and left_in_flight <= refused:
            return "all"
        return "all" if refused >= (SEVERAL if by_status else MANY) and left_in_flight <= 2 * refused else "unclear"
