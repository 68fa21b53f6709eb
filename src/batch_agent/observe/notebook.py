"""Progress of a run in a notebook: one output that is redrawn in place and becomes the summary.

IPython displays it; it is imported only inside a kernel.
"""

from __future__ import annotations

import html
import secrets
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Self, TypeAlias

from batch_agent.observe.metrics import Statistics
from batch_agent.observe.terminal import progress_line
from batch_agent.observe.words import error_line, outage_line

# A text for each MIME type, and whether it replaces the previous output.
Publish: TypeAlias = Callable[[Mapping[str, str], bool], None]


def publisher() -> Publish:
    """Return a function that shows output in the running cell; all its calls share one output."""
    publish = import_module("IPython.display").publish_display_data
    name = secrets.token_hex(8)

    def show(data: Mapping[str, str], update: bool) -> None:
        publish(dict(data), transient={"display_id": name}, update=update)

    return show


class NotebookDisplay:
    interval = 0.5

    def __init__(self, publish: Publish) -> None:
        self._publish = publish

    def __enter__(self) -> Self:
        self._publish(_page(Statistics()), False)
        return self

    def __exit__(self, *exception: object) -> None:
        pass

    def show(self, statistics: Statistics) -> None:
        self._publish(_page(statistics), True)

    def conclude(self, summary: str) -> None:
        """Show the summary in place of the progress."""
        self._publish({"text/plain": summary, "text/html": f"<pre>{html.escape(summary)}</pre>"}, True)


def _page(statistics: Statistics) -> dict[str, str]:
    troubles = [*map(outage_line, statistics.outages), *map(error_line, reversed(statistics.recent_errors))]
    line = progress_line(statistics)
    # Without a value a browser shows an indeterminate bar.
    value = f' max="{statistics.total}" value="{statistics.done}"' if statistics.total else ""
    shown = "".join(f"<br>{html.escape(text)}" for text in (line, *troubles))
    bar = f'<progress style="width: 100%"{value}></progress>'
    return {
        "text/plain": "\n".join([line, *troubles]),
        "text/html": f'<div style="font-family: monospace">{bar}{shown}</div>',
    }
