"""What the requests of a batch share, and what another order of their parts would cost.

An engine with a prefix cache computes a shared prefix once. The same text after a part that differs is computed again
for every row. So the order ``[system][tools][shared material][the row's own]`` costs least.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from batch_agent.compiler.budget import estimate_tokens
from batch_agent.compiler.template import Piece

FEW_TOKENS = 16  # not worth a note: less than a block of most prefix caches


@dataclass(frozen=True, slots=True)
class Layout:
    """Estimated tokens of first requests, of some rows of the batch."""

    prefix_tokens: int  # that all rows begin with
    own_tokens: int  # the mean of what a row adds
    sibling_tokens: int  # of these, the mean of what a row has in common with the sibling that begins most like it
    late_tokens: int  # of these, text of the task that is the same in all rows, but stands behind a field

    def computed(self, rows: int) -> int:
        """Prompt tokens that an engine with a prefix cache computes for all first requests."""
        return self.prefix_tokens + rows * self.own_tokens

    def own_first(self, rows: int) -> int:
        """The same if each row's own part stood first: nothing is shared."""
        return rows * (self.prefix_tokens + self.own_tokens)

    def facts(self, rows: int | None) -> Iterable[tuple[str, str]]:
        """Lines for people: a label and a text."""
        whole, shared = self.prefix_tokens + self.own_tokens, self.prefix_tokens + self.sibling_tokens
        if not whole:
            return
        yield "siblings", f"each row shares {shared:,} of its {whole:,} tokens ({shared / whole:.0%}) with its nearest"
        if rows is not None and rows > 1:
            now, worst = self.computed(rows), self.own_first(rows)
            text = f"shared first, as here: {now:,} tokens to compute; own first: {worst:,}"
            yield "layout", f"{text}, {worst / now:.1f} times as many"
        if self.late_tokens >= FEW_TOKENS:
            saved = "" if rows is None else f", and save {(rows - 1) * self.late_tokens:,} tokens"
            text = f"{self.late_tokens:,} tokens of the task are the same in all rows, but stand behind a field"
            yield "layout", f"{text}: write them before the first field, or in the system prompt{saved}"


def layout_of(prefix_tokens: int, head: str, prompts: Sequence[str], pieces: Sequence[Piece]) -> Layout:
    """``prompts`` are some rows' messages, which all begin with ``head``; ``pieces`` are those of the first one."""
    if not prompts:
        return Layout(prefix_tokens, 0, 0, 0)
    in_head = estimate_tokens(head)
    own = [max(0, estimate_tokens(prompt) - in_head) for prompt in prompts]
    ordered = sorted(prompts)  # so that the most alike stand side by side
    alike = [0, *(_alike(*pair) for pair in pairwise(ordered)), 0]
    nearest = [max(0, max(before, after) - in_head) for before, after in pairwise(alike)]
    filled = next((place for place, (_, is_filled) in enumerate(pieces) if is_filled), len(pieces))
    late = sum(estimate_tokens(text) for text, is_filled in pieces[filled:] if not is_filled)
    mean = len(prompts)
    return Layout(prefix_tokens, -(-sum(own) // mean), sum(nearest) // mean, late)


def _alike(one: str, other: str) -> int:
    """Return the tokens of the common prefix of two texts."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if one[:middle] == other[:middle] else (low, middle - 1)
    return estimate_tokens(one[:low])
