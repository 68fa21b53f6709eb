"""Foragers on a grid look for berries; a model decides for all of them at every tick.

python examples/foragers.py                      # on the embedded model, or on BATCH_AGENT_BACKEND
python examples/foragers.py --agents 16 --ticks 40 --deadline 0.5
"""

import argparse
import asyncio
import random
from typing import Literal

from rich.console import Console
from rich.live import Live

from batch_agent.ticks import Action, Agent, AgentRuntime, WindowMemory

WIDTH, HEIGHT, BERRIES = 24, 8, 12
STEPS = {"north": (0, -1), "south": (0, 1), "east": (1, 0), "west": (-1, 0)}
RULES = """You look for berries on a grid: walk to the one that you see, and rest when there is none.
{'berry': 'north'} -> {"tool": "walk", "params": {"direction": "north"}}
{'berry': 'west'} -> {"tool": "walk", "params": {"direction": "west"}}"""


def walk(direction: Literal["north", "south", "east", "west"]) -> None:
    """Go one step, and pick the berry that is there."""


def rest() -> None:
    """Stay where you are."""


class World:
    def __init__(self, ids: list[str]) -> None:
        self.chance = random.Random(3)
        self.at = {one: self.anywhere() for one in ids}
        self.berries = {self.anywhere() for _ in range(BERRIES)}
        self.picked = dict.fromkeys(ids, 0)

    def anywhere(self) -> tuple[int, int]:
        return self.chance.randrange(WIDTH), self.chance.randrange(HEIGHT)

    def seen_by(self, one: str) -> dict[str, object]:
        if not self.berries:
            return {"berry": None}
        x, y = self.at[one]
        bx, by = min(self.berries, key=lambda berry: abs(berry[0] - x) + abs(berry[1] - y))
        across = abs(bx - x) >= abs(by - y)
        return {"berry": ("east" if bx > x else "west") if across else ("south" if by > y else "north")}

    def act(self, one: str, action: Action) -> None:
        dx, dy = STEPS.get(action.parameters.get("direction", ""), (0, 0))
        x, y = self.at[one]
        self.at[one] = x, y = min(max(x + dx, 0), WIDTH - 1), min(max(y + dy, 0), HEIGHT - 1)
        if (x, y) in self.berries:
            self.berries.remove((x, y))
            self.picked[one] += 1

    def show(self, tick: int, actions: dict[str, Action]) -> str:
        cells = dict.fromkeys(self.berries, "*") | {place: one[-1] for one, place in self.at.items()}
        rows = ["".join(cells.get((x, y), "·") for x in range(WIDTH)) for y in range(HEIGHT)]
        told = [
            f"{one} saw {action.seen_tick or 'nothing'}: {action.tool_name} {action.parameters.get('direction', '')}"
            f" ({action.source}), {self.picked[one]} picked"
            for one, action in list(actions.items())[:8]
        ]
        return "\n".join([f"tick {tick}, {len(self.berries)} berries left", *rows, *told])


async def main(agents: int, ticks: int, deadline: float) -> None:
    ids = [f"forager-{number}" for number in range(agents)]
    world, console = World(ids), Console()
    runtime = AgentRuntime(system_prompt=RULES, deadline=deadline, max_tokens=40)
    for one in ids:
        memory = WindowMemory(observations=1, actions=0)  # the model is small: it is told what counts now
        runtime.register_agent(Agent(one, tools=[walk, rest], memory=memory, fallback=Action("rest")))
    async with runtime:
        with Live(console=console, auto_refresh=False) as live:
            for tick in range(1, ticks + 1):
                actions = await runtime.process_tick(tick, {one: world.seen_by(one) for one in ids})
                for one, action in actions.items():
                    world.act(one, action)
                if console.is_terminal:
                    live.update(world.show(tick, actions), refresh=True)
                else:
                    print(world.show(tick, actions), flush=True)
                if not world.berries:
                    break


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Foragers on a grid look for berries.")
    parser.add_argument("--agents", type=int, default=4)
    parser.add_argument("--ticks", type=int, default=30)
    parser.add_argument("--deadline", type=float, default=2.0, help="seconds that a tick may take")
    asked = parser.parse_args()
    asyncio.run(main(asked.agents, asked.ticks, asked.deadline))
