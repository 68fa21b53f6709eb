"""How many slots each of several parties may use: as many as it wants; where that is more than there are, an equal
share each, and what one does not want goes to the others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

P = TypeVar("P")


def shares(wants: Mapping[P, float], total: int) -> dict[P, int]:
    """At least one each, so that nobody stands still. More than a party wants now is held ready for it, as long as
    others do not want it: it may want more at any time."""
    fair: dict[P, int] = {}
    left, parties = total, len(wants)
    for party, want in sorted(wants.items(), key=lambda item: item[1]):
        share = -(-left // parties)
        fair[party] = max(1, share)
        left -= min(share, max(1, int(min(want, share))))
        parties -= 1
    return fair
