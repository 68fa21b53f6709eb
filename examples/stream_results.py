"""Take results as they finish, from inputs that are read as they are needed, and stop when enough are there.

python examples/stream_results.py
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

from batch_agent import BatchAgent


def questions() -> Iterator[str]:
    for number in range(1_000_000):  # only as many are made as are asked
        yield f"Is {number} prime? Answer yes or no."


async def main() -> None:
    answered = 0
    async for result in BatchAgent.stream(task="{input}", inputs=questions(), max_tokens=64, max_inflight=8):
        print(result.index, result.output if result.ok else result.error)
        answered += 1
        if answered == 5:
            break  # what is in flight is closed; nothing more is sent


if __name__ == "__main__":
    asyncio.run(main())
