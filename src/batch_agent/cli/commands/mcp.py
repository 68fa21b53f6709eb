"""``batch-agent mcp``: this engine as an MCP server on standard input and output, for coding agents."""

from __future__ import annotations

import argparse
from pathlib import Path

from batch_agent.cli.commands.mcp_batches import Batches
from batch_agent.cli.exit_status import ALL_OK
from batch_agent.cli.spec.arguments import RUNS
from batch_agent.messages import JsonObject
from batch_agent.tools.mcp.address import require_sdk


def add_mcp_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--directory", default=RUNS, metavar="DIR", help="where batches are kept (default %(default)s)")
    parser.add_argument("--backend", metavar="URL", help="where inference happens, for all batches")
    parser.add_argument("--model", help="the model of batches that name none")
    parser.add_argument("--max-cost", type=float, metavar="DOLLARS", help="what one batch may cost at the most")


def mcp_command(options: argparse.Namespace) -> int:
    require_sdk("batch-agent mcp")
    given = {"backend": options.backend, "model": options.model}
    spec: JsonObject = {name: value for name, value in given.items() if value is not None}
    batches = Batches(Path(options.directory).absolute(), spec, options.max_cost)
    from batch_agent.cli.commands.mcp_server import make_server

    # While it serves, standard output carries the protocol alone: what anything else prints goes to standard error.
    make_server(batches).run("stdio")
    return ALL_OK
