"""Summarises many answers level by level until one is left, and records which leaves it includes.

A group has at most ``fanin`` answers. With ``max_context`` a group also fits a request of that many tokens, and an
answer alone in its group moves to the next level unchanged.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import add, itemgetter
from typing import Unpack

from batch_agent.errors import SpecError
from batch_agent.messages import Usage
from batch_agent.swarm.options import Response, SwarmOptions, whole
from batch_agent.swarm.patterns.steps import BETWEEN, Steps, filled
from batch_agent.swarm.pool import AgentPool
from batch_agent.swarm.vllm_pool import CHARACTERS_PER_TOKEN, DEFAULT_TOKENS


@dataclass(frozen=True, slots=True)
class Coverage:
    """The numbers of the leaves that are in the answer, and of the others with the reasons."""

    leaves: int
    included: tuple[int, ...]
    lost: dict[int, str]


@dataclass
class Reduced(Response):
    """The result. ``usage`` is the sum over all requests. ``levels``: with ``keep_levels``, the responses of each
    level, leaves first."""

    coverage: Coverage = field(default_factory=lambda: Coverage(0, (), {}))
    levels: list[list[Response]] = field(default_factory=list)


Node = tuple[tuple[int, ...], Response]  # the leaves of an answer, and the answer


async def tree_reduce(
    pool: AgentPool,
    prompt: str,
    reduce_prompt: str,
    fanin: int = 50,
    items: Sequence[object] | None = None,
    *,
    max_context: int | None = None,
    keep_levels: bool = False,
    **options: Unpack[SwarmOptions],
) -> Reduced:
    """Reduce the answers to one. With ``items``, each item replaces ``{item}`` in the prompt and gives one leaf;
    without, every agent answers the prompt. ``reduce_prompt`` must contain ``{responses}`` and may contain ``{level}``,
    counted from 1."""
    whole("fanin", fanin, least=2)  # groups of one would never end
    if "{responses}" not in reduce_prompt:
        raise SpecError("reduce_prompt has no {responses}: it would not contain the answers")
    steps = Steps(options)
    room = None if max_context is None else _room(max_context, reduce_prompt, pool)
    if items is None:
        leaves = await pool.broadcast_prompt(prompt, **steps.options(first=True))
    else:
        leaves = await pool.send_all([filled(prompt, item=item) for item in items], **steps.options(first=True))
    levels, lost = [leaves], dict[int, str]()
    nodes = _kept([(number,) for number in range(len(leaves))], leaves, lost)
    problem = "no answer was left to summarise"
    while len(nodes) > 1:
        groups = list(_groups(nodes, fanin, room))
        if len(groups) == len(nodes):
            problem = f"no two of {len(groups)} answers fit max_context, {max_context} tokens"
            break
        alone = [] if room is None else [node for group in groups if len(group) == 1 for node in group]
        together = [group for group in groups if room is None or len(group) > 1]
        prompts = [
            filled(reduce_prompt, responses=BETWEEN.join(answer.text for _, answer in group), level=len(levels))
            for group in together
        ]
        responses = await pool.send_all(prompts, **steps.options(last=len(groups) == 1))
        covered = [tuple(leaf for leaves, _ in group for leaf in leaves) for group in together]
        nodes = sorted([*alone, *_kept(covered, responses, lost, f"level {len(levels)}: ")], key=itemgetter(0))
        levels.append(responses)
    reduced = _reduced(nodes, lost, problem)
    reduced.coverage = Coverage(len(leaves), nodes[0][0] if reduced.success else (), dict(sorted(lost.items())))
    usages = [response.usage for level in levels for response in level if response.usage is not None]
    reduced.usage = reduce(add, usages, Usage()) if usages else None
    reduced.levels = levels if keep_levels else []
    return reduced


def _kept(
    covered: Sequence[tuple[int, ...]], responses: Sequence[Response], lost: dict[int, str], where: str = ""
) -> list[Node]:
    """Return the answers that have a text. Leaves of the other answers are added to ``lost``, with the reason."""
    nodes = []
    for leaves, response in zip(covered, responses, strict=True):
        if response.success and response.text.strip():
            nodes.append((leaves, response))
        else:
            why = "the answer was blank" if response.success else response.error
            lost.update(dict.fromkeys(leaves, f"{where}{why}"))
    return nodes


def _reduced(nodes: Sequence[Node], lost: dict[int, str], problem: str) -> Reduced:
    """Return the remaining answer, or a failed one with ``problem``."""
    if len(nodes) != 1:
        lost.update({leaf: problem for leaves, _ in nodes for leaf in leaves})
        why = next(iter(lost.values()), problem)
        return Reduced(False, "", problem if why == problem else f"{problem}: {why}")
    _, answer = nodes[0]
    told = {name: getattr(answer, name) for name in ("finish_reason", "latency", "attempts", "parsed")}
    return Reduced(True, answer.text, **told)


def _room(max_context: int, template: str, pool: AgentPool) -> int:
    """Return how many characters of answers fit into one request, beside the template and the answer."""
    answer = pool.answer_tokens or DEFAULT_TOKENS
    room = (max_context - answer) * CHARACTERS_PER_TOKEN - len(template)
    if room <= 0:
        raise SpecError(f"max_context is {max_context}: an answer of {answer} tokens and the prompt already fill it")
    return room


def _groups(nodes: Sequence[Node], fanin: int, room: int | None) -> Iterator[list[Node]]:
    group: list[Node] = []
    length = 0
    for node in nodes:
        more = len(node[1].text) + len(BETWEEN)
        if group and (len(group) == fanin or (room is not None and length + more > room)):
            yield group
            group, length = [], 0
        group.append(node)
        length += more
    if group:
        yield group
