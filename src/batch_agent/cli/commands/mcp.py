"""``batch-agent mcp``: an MCP server on standard input and output, with which coding agents run batches."""

from __future__ import annotations

import argparse
from pathlib import Path

from batch_agent.cli.exit_status import ALL_OK
from batch_agent.cli.spec.arguments import RUNS
from batch_agent.messages import JsonObject
from batch_agent.tools.mcp.address import require_sdk


def add_mcp_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--directory", default=RUNS, metavar="DIR", help="directory of batches (default %(default)s)")
    parser.add_argument("--backend", metavar="URL", help="inference server of all batches")
    parser.add_argument("--model", help="model of batches that give none")
    parser.add_argument("--max-cost", type=float, metavar="DOLLARS", help="maximum cost of one batch")


def mcp_command(options: argparse.Namespace) -> int:
    require_sdk("batch-agent mcp")
    given = {"backend": options.backend, "model": options.model}
    spec: JsonObject = {name: value for name, value in given.items() if value is not None}
    from batch_agent.cli.commands.mcp_server import Batches, make_server

    batches = Batches(Path(options.directory).absolute(), spec, options.max_cost)
    # While it serves, standard output is for the protocol only; other output goes to standard error.
    make_server(batches).run("stdio")
    return ALL_OK
