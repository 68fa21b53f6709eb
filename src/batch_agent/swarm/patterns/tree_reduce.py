"""Summarises many answers level by level until one is left, and records which leaves it includes.

A group has at most ``fanin`` answers. With ``max_context`` a group also fits a request of that many tokens, and an
answer alone in its group moves to the next level unchanged.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import add
from typing import Unpack

from batch_agent.errors import SpecError
from batch_agent.messages import Usage
from batch_agent.swarm.options import Response, SwarmOptions, whole
from batch_agent.swarm.patterns.steps import BETWEEN, Steps, filled
from batch_agent.swarm.pool import AgentPool
from batch_agent.swarm.vllm_pool import CHARACTERS_PER_TOKEN, DEFAULT_TOKENS


@dataclass(frozen=True, slots=True)
class Coverage:
    """Which leaves are in the answer, and why the others are not, by number."""

    leaves: int
    included: tuple[int, ...]
    lost: dict[int, str]


@dataclass
class Reduced(Response):
    """``usage`` is of all requests. ``levels``: with ``keep_levels``, the responses, leaves first."""

    coverage: Coverage = field(default_factory=lambda: Coverage(0, (), {}))
    levels: list[list[Response]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Node:
    response: Response
    leaves: tuple[int, ...]


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
    """Return the reduction of the leaves. With ``items`` each replaces ``{item}`` in the prompt; without, every agent
    gets the prompt. ``reduce_prompt`` must contain ``{responses}`` and may contain ``{level}``, from 1."""
    whole("fanin", fanin, least=2)  # groups of one would never end
    if "{responses}" not in reduce_prompt:
        raise SpecError("reduce_prompt has no {responses}: it would not contain the answers")
    steps = Steps(options)
    room = None if max_context is None else _room(max_context, reduce_prompt, pool)
    if items is None:
        leaves = await pool.broadcast_prompt(prompt, **steps.options(first=True))
    else:
        leaves = await pool.send_all([filled(prompt, item=item) for item in items], **steps.options(first=True))
    tree = _Tree(leaves)
    while len(tree.nodes) > 1:
        groups = list(_groups(tree.nodes, fanin, room))
        if len(groups) == len(tree.nodes):
            return tree.result(f"no two of {len(groups)} answers fit max_context, {max_context} tokens", keep_levels)
        alone = [] if room is None else [group for group in groups if len(group) == 1]
        together = [group for group in groups if group not in alone]
        own = steps.options(last=len(groups) == 1)
        responses = await pool.send_all([tree.prompt(reduce_prompt, group) for group in together], **own)
        tree.grow(together, responses, alone)
    return tree.result("no answer was left to summarise", keep_levels)


class _Tree:
    def __init__(self, leaves: Sequence[Response]) -> None:
        self.levels = [list(leaves)]
        self.nodes: list[_Node] = []
        self._lost: dict[int, str] = {}
        for number, leaf in enumerate(leaves):
            self._keep(leaf, (number,), "")

    def prompt(self, template: str, group: Sequence[_Node]) -> str:
        together = BETWEEN.join(node.response.text for node in group)
        return filled(template, responses=together, level=len(self.levels))

    def grow(
        self, groups: Sequence[Sequence[_Node]], responses: Sequence[Response], alone: Sequence[Sequence[_Node]]
    ) -> None:
        """Build the next level: an answer for each group, and the unchanged ones, in the order of leaves."""
        where = f"level {len(self.levels)}: "
        self.levels.append(list(responses))
        self.nodes = [node for group in alone for node in group]
        for group, response in zip(groups, responses, strict=True):
            self._keep(response, tuple(leaf for node in group for leaf in node.leaves), where)
        self.nodes.sort(key=lambda node: node.leaves)

    def _keep(self, response: Response, leaves: tuple[int, ...], where: str) -> None:
        if response.success and response.text.strip():
            self.nodes.append(_Node(response, leaves))
        else:
            why = "the answer was blank" if response.success else response.error
            self._lost.update(dict.fromkeys(leaves, f"{where}{why}"))

    def result(self, problem: str, keep_levels: bool) -> Reduced:
        """Return the remaining answer, or a failed one with ``problem``."""
        included: tuple[int, ...] = ()
        if len(self.nodes) == 1:
            last, included = self.nodes[0].response, self.nodes[0].leaves
            reduced = Reduced(True, last.text, finish_reason=last.finish_reason, parsed=last.parsed)
            reduced.latency, reduced.attempts = last.latency, last.attempts
        else:
            self._lost.update({leaf: problem for node in self.nodes for leaf in node.leaves})
            why = next(iter(self._lost.values()), problem)
            reduced = Reduced(False, "", problem if why == problem else f"{problem}: {why}")
        reduced.coverage = Coverage(len(self.levels[0]), included, dict(sorted(self._lost.items())))
        usages = [response.usage for level in self.levels for response in level if response.usage is not None]
        reduced.usage = reduce(add, usages, Usage()) if usages else None
        reduced.levels = self.levels if keep_levels else []
        return reduced


def _room(max_context: int, template: str, pool: AgentPool) -> int:
    """Return how many characters of answers fit one request, beside the template and the answer."""
    answer = pool.answer_tokens or DEFAULT_TOKENS
    room = (max_context - answer) * CHARACTERS_PER_TOKEN - len(template)
    if room <= 0:
        raise SpecError(f"max_context is {max_context}: an answer of {answer} tokens and the prompt already fill it")
    return room


def _groups(nodes: Sequence[_Node], fanin: int, room: int | None) -> Iterator[list[_Node]]:
    group: list[_Node] = []
    length = 0
    for node in nodes:
        more = len(node.response.text) + len(BETWEEN)
        if group and (len(group) == fanin or (room is not None and length + more > room)):
            yield group
            group, length = [], 0
        group.append(node)
        length += more
    if group:
        yield group
