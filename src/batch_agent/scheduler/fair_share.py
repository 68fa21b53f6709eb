"""How many slots each of several parties may use: as many as it wants, or an equal share if they want too many.

What one party does not want goes to the others.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

P = TypeVar("P")


def shares(wants: Mapping[P, float], total: int) -> dict[P, int]:
    """Return the slots of each party, at least one each. A party may get more than it wants now, if the others do not
    want them: it may want more at any time."""
    fair: dict[P, int] = {}
    left, parties = total, len(wants)
    for party, want in sorted(wants.items(), key=lambda item: item[1]):
        share = -(-left // parties)
        fair[party] = max(1, share)
        left -= min(share, max(1, int(min(want, share))))
        parties -= 1
    return fair
