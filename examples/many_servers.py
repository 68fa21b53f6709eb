"""Many servers and a hostfile: ask them all, vote, sum up, and see what was lost.

Three servers of this process stand for the nodes of a cluster, and one that nobody started for the node that is down.

python examples/many_servers.py
"""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

from batch_agent.swarm import VLLMPool, parse_hostfile
from batch_agent.swarm.aggregators import failure_report, majority_vote
from batch_agent.swarm.patterns.broadcast import broadcast
from batch_agent.swarm.patterns.scatter_gather import map_gather
from batch_agent.swarm.patterns.tree_reduce import tree_reduce
from batch_agent.testing import Request, Say, ScriptedServer


def node(request: Request) -> Say:
    if request.text.startswith("Sum up"):
        return Say(f"{request.text.count('fits')} of them fit")
    return Say("yes" if "vote" in request.text else f"{request.text.rpartition(' ')[2]} fits")


async def main() -> None:
    async with AsyncExitStack() as nodes:
        servers = [await nodes.enter_async_context(ScriptedServer(node)) for _ in range(3)]
        with TemporaryDirectory() as folder:
            hosts = Path(folder) / "hosts.txt"
            lines = [f"{server.address}\trole=worker" for server in servers]
            hosts.write_text("\n".join([*lines, "127.0.0.1\t9\trole=worker  # down"]))
            endpoints = parse_hostfile(hosts)
        async with VLLMPool(endpoints, timeout=3.0, temperature=0.0) as pool:  # waits 3 s for a node that is down
            votes = await broadcast(pool, "Do you vote for it?")
            print("vote:", majority_vote(votes), "failures:", failure_report(votes)["failure_count"])

            # By default item i goes to agent i mod 4, the one that is down included. Balanced, it goes elsewhere.
            items = [f"sample-{number}" for number in range(12)]
            answers = await map_gather(pool, items, "Does it fit? {item}", dispatch="balanced", chat=True)
            print("answered:", sum(answer.success for answer in answers), "of", len(answers))

            whole = await tree_reduce(pool, "Does it fit? {item}", "Sum up: {responses}", items=items)
            print(f"{whole.text}; {len(whole.coverage.included)} leaves are in, {len(whole.coverage.lost)} are lost")


if __name__ == "__main__":
    asyncio.run(main())
