"""Merges several answers into one: the prompt for it, and which answers are merged together.

Answers are grouped by tokens, in order. A group has at least two, otherwise merging would never end.
"""

from __future__ import annotations

from collections.abc import Sequence

from batch_agent.compiler.tokens import estimate_tokens

AROUND_TOKENS = 8  # the text around one answer
INSTRUCTION = """\
A task was given with a text that is too long to be read at once, so the text was read in parts, which overlap a \
little, and the task was done for each part.

The task:
{task}

The answers, in the order of the parts:
{answers}

Give the one answer to the task that holds for the whole text. Keep what the answers found, in its order; say once \
what several say; where they contradict each other, the one that read the passage in question is right. Add nothing."""


def merge_prompt(task: str, answers: Sequence[str]) -> str:
    numbered = (f"<answer part={number}>\n{answer}\n</answer>" for number, answer in enumerate(answers, start=1))
    return INSTRUCTION.format(task=task, answers="\n".join(numbered))


def groups(answers: Sequence[str], room: int) -> list[Sequence[str]]:
    """Return the groups of answers that fit into ``room`` tokens each."""
    grouped: list[list[str]] = []
    used = 0
    for answer in answers:
        tokens = estimate_tokens(answer) + AROUND_TOKENS
        if not grouped or (used + tokens > room and len(grouped[-1]) > 1):
            grouped.append([])
            used = 0
        grouped[-1].append(answer)
        used += tokens
    if len(grouped) > 1 and len(grouped[-1]) == 1:
        grouped[-2] += grouped.pop()
    return [*grouped]
