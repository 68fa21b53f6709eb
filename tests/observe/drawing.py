"""A busy run, and views drawn as text."""

import io

from rich.console import Console

from batch_agent.messages import Usage
from batch_agent.observe.statistics import RecentError, Statistics
from batch_agent.observe.terminal import Screen
from batch_agent.tools.execution import ToolStatistics

HOSTILE = "\x1b[31mred\x1b[0m [bold]x[/bold] [/nonsense] :smile:\r\n\x07\u202e\ud800 end"
BUSY = Statistics(
    backend="vllm://gpu-1:8000",
    model="[link=x]some/model",
    total=1000,
    done=412,
    ok=409,
    failures={"RateLimited": 2, "OVERSIZED": 1},
    running=64,
    waiting_on_tools=12,
    backing_off=2,
    turns=900,
    retries=3,
    usage=Usage(1_203_442, 1_010_221, 88_120),
    tool_runs=310,
    tool_shared=402,
    tool_cached=492,
    elapsed=33.4,
    recent_rate=12.3,
    max_inflight=64,
    recent_errors=(
        RecentError(17, "RateLimited", HOSTILE, 3, True),
        RecentError(18, "OVERSIZED", "too long", 1, False),
    ),
)


def drawn(statistics: Statistics, width: int, height: int = 24) -> str:
    console = Console(
        file=io.StringIO(),
        width=width,
        height=height,
        color_system=None,
        markup=False,
        emoji=False,
        highlight=False,
    )
    console.print(Screen(statistics))
    file = console.file
    assert isinstance(file, io.StringIO)
    return file.getvalue()


def tool(name: str, reasons: tuple[tuple[str, int], ...] = (), saveable: int = 0) -> ToolStatistics:
    failures = sum(count for _, count in reasons)
    return ToolStatistics(name, 40, 40, 0, 0, failures, reasons, None, None, None, saveable)
