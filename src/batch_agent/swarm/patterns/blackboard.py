"""A shared board on which agents of different roles write, round after round."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import TypedDict, Unpack

from batch_agent.errors import SpecError
from batch_agent.swarm.options import SwarmOptions
from batch_agent.swarm.patterns.steps import Steps
from batch_agent.swarm.pool import AgentPool

Board = dict[str, list[str]]


class Snapshot(TypedDict):
    round: int
    board: Board


class Blackboard:
    """``prompt_fn(role, board)`` returns the prompt for the agents of a role."""

    def __init__(self, sections: Sequence[str], prompt_fn: Callable[[str, Board], str]) -> None:
        self.board: Board = {section: [] for section in sections}
        self._prompt_fn = prompt_fn
        self.round = 0  # number of completed rounds

    def snapshot(self) -> Snapshot:
        """Return a copy that later rounds do not change."""
        return {"round": self.round, "board": copy.deepcopy(self.board)}

    async def run(
        self,
        pool: AgentPool,
        max_rounds: int = 10,
        convergence_fn: Callable[[Board], bool] | None = None,
        **options: Unpack[SwarmOptions],
    ) -> Board:
        """Return the board after ``max_rounds``, or after a round for which ``convergence_fn`` returns True. In each
        round the answers of the agents tagged ``role=section`` are appended to each section in turn."""
        if options.get("run_dir") is not None:
            raise SpecError("a blackboard cannot be resumed from a run_dir: its prompts depend on the board")
        sections = {section: pool.by_tag("role", section) for section in self.board}
        steps = Steps(options)
        for _ in range(max_rounds):
            for section, agents in sections.items():
                if agents.size:
                    prompt = self._prompt_fn(section, self.board)
                    responses = await agents.broadcast_prompt(prompt, **steps.options(first=True))
                    self.board[section] += [response.text for response in responses if response.success]
            self.round += 1
            if convergence_fn is not None and convergence_fn(self.board):
                break
        return self.board
