"""``batch-agent init``: writes a small, complete example that runs."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path

from batch_agent.cli.exit_status import ALL_OK
from batch_agent.cli.output.streams import put
from batch_agent.errors import BatchAgentError, SpecError, explained

SPEC = """\
# The message for each row. {field} becomes the value of that column.
task: |
  A customer wrote: {text}

  Look up the product {sku}, then say what they feel and what should be done.

# The same for all rows. Put text that all rows share here.
system_prompt: You sort messages to the support desk of a shop.

inputs: rows.csv                # or .jsonl, .json, .tsv, .parquet, .xlsx, a directory
output_schema: support:Answer   # the class Answer in support.py
tools: [support:look_up]        # functions that the model may call

# The inference server. Default: the one that `batch-agent doctor` shows.
# backend: vllm://localhost:8000
# model: Qwen/Qwen2.5-7B-Instruct
# max_cost: 1.00                # dollars; the run ends before it costs more
"""

MODULE = '''\
"""The schema of the answers, and a tool that the model may call."""

from typing import Literal

from pydantic import BaseModel, Field

from batch_agent import Tool

PRODUCTS = {"K-1": "kettle, 1.7 l, two years of warranty", "T-4": "toaster, four slots, recalled in March"}


class Answer(BaseModel):
    mood: Literal["happy", "neutral", "angry"]
    action: Literal["reply", "refund", "escalate"]
    reason: str = Field(description="one sentence")


@Tool.define(cacheable=True)  # it only reads, so equal calls are answered once
def look_up(sku: str) -> str:
    """Return the catalogue entry of a product.

    Args:
        sku: the product's number, such as K-1
    """
    return PRODUCTS.get(sku, "not in the catalogue")
'''

ROWS = """\
id,sku,text
m1,K-1,"The kettle is lovely, thank you!"
m2,T-4,"The toaster smokes and no one answers, I want my money back."
m3,K-1,"How do I remove the limescale?"
"""

FILES = {"spec.yaml": SPEC, "support.py": MODULE, "rows.csv": ROWS}


def add_init_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "directory", nargs="?", default=".", metavar="DIR", help="directory of the files (default: here)"
    )


def init_command(options: argparse.Namespace) -> int:
    directory = Path(options.directory)
    there = [name for name in FILES if (directory / name).exists()]
    if there:
        raise SpecError(f"{directory} already has {', '.join(there)}: give another directory; no file is overwritten")
    with explained(f"cannot write in {directory}", BatchAgentError):
        directory.mkdir(parents=True, exist_ok=True)
        for name, text in FILES.items():
            with (directory / name).open("x", encoding="utf-8") as file:
                file.write(text)
    spec = shlex.quote(str(directory / "spec.yaml"))
    put(
        f"wrote {', '.join(str(directory / name) for name in FILES)}\n\n"
        f"  batch-agent run {spec} --dry-run     show what would be sent\n"
        f"  batch-agent run {spec}               run it\n"
        f"  batch-agent doctor{' ' * max(1, len(spec) + 2)}            show the backend that is used"
    )
    return ALL_OK
