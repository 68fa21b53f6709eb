"""Decides whether a denial (401, 403, 404 and similar) concerns one row, or every row of the run.

A wrong key concerns all rows. So does a path or a model that does not exist, if the server has never given a good
answer. After good answers, a wrong key is first confirmed by a second request, because a gateway may deny one request
by mistake. If that is denied too, with no good answer in between, it concerns all rows.

Anything else (a forbidden topic, a bad image) may concern only the row. It is unclear until a request sent at the same
time or later gets a good answer, or until other rows are denied too. The same denial of several rows with no such
answer between them concerns all rows, unless many more requests are in flight: a denial often arrives sooner than an
answer.
"""

from __future__ import annotations

import re
from collections.abc import Hashable
from typing import Literal

Scope = Literal["row", "confirm", "unclear", "all"]

WRONG_KEY = frozenset({401, 402, 429})  # the 429 of a spent quota; a 429 with a Retry-After is not a denial
WRONG_PLACE = frozenset({301, 302, 303, 307, 308, 404, 405})
FORBIDDEN = 403
CONFIRMED = 2  # number of rows whose key was refused
SEVERAL = 10  # number of rows with a status that may concern all; a moderator may refuse a few in a row
FEW = 3  # the same before any good answer, with few requests in flight
MANY = 20  # number of rows with the same message and another status

_VARIABLE = re.compile(r"\d+|'[^']*'|\"[^\"]*\"")


class Refusals:
    def __init__(self) -> None:
        self._answered = False
        self._kind: tuple[int, str] | None = None  # of the unclear denials, which all have the same kind
        self._rows: dict[Hashable, float] = {}  # row → when its request was sent

    def answered(self, sent_at: float) -> None:
        """Record a good answer to a request sent at ``sent_at``."""
        self._answered = True
        if self._rows:
            self._rows = {row: sent for row, sent in self._rows.items() if sent > sent_at}

    def is_unclear(self, row: Hashable) -> bool:
        return row in self._rows

    def scope(
        self,
        row: Hashable,
        status: int | None,
        message: str,
        sent_at: float,
        left_in_flight: int,
        *,
        confirmed: bool = False,
    ) -> Scope:
        """Return which rows a denial concerns. ``confirm``: send it once more and pass ``confirmed``."""
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
        again = row in self._rows
        if wrong_key and confirmed and not again:
            return "row"  # other rows were answered meanwhile
        self._rows[row] = sent_at
        refused = len(self._rows)
        if wrong_key:
            if refused >= CONFIRMED or (confirmed and not left_in_flight):
                return "all"
            return "unclear" if confirmed else "confirm"
        if by_status and not self._answered and refused >= FEW and left_in_flight <= refused:
            return "all"
        return "all" if refused >= (SEVERAL if by_status else MANY) and left_in_flight <= 2 * refused else "unclear"
