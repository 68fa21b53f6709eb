"""The view in a notebook: on its own, and in a real kernel."""

import json
from collections.abc import Mapping
from typing import Any

import pytest

from batch_agent.observe.statistics import RecentError, Statistics
from batch_agent.observe.terminal import NotebookDisplay


class Cell:
    """An output of a notebook, and everything it has shown."""

    def __init__(self) -> None:
        self.shown: list[tuple[dict[str, str], bool]] = []

    def __call__(self, data: Mapping[str, str], update: bool) -> None:
        self.shown.append((dict(data), update))


def test_one_output_is_redrawn_and_ends_as_the_summary() -> None:
    cell = Cell()
    error = RecentError(3, "Invalid", "<b>not</b> a number", 1, retried=False)
    with NotebookDisplay(cell) as view:
        view.show(Statistics(total=10, done=4, ok=3, recent_errors=(error,)))
        view.conclude("10 rows: 9 ok\n  failed   1 <Invalid>")
    assert [update for _, update in cell.shown] == [False, True, True]
    going, ended = cell.shown[1][0], cell.shown[2][0]
    assert 'max="10" value="4"' in going["text/html"]
    assert "4/10 (40 %)" in going["text/plain"]
    assert "&lt;b&gt;not&lt;/b&gt; a number" in going["text/html"]
    assert ended["text/plain"] == "10 rows: 9 ok\n  failed   1 <Invalid>"
    assert ended["text/html"] == "<pre>10 rows: 9 ok\n  failed   1 &lt;Invalid&gt;</pre>"


SETUP = """
from batch_agent import BatchAgent
from batch_agent.observe import progress
from batch_agent.testing import Fail, Say, ScriptedBackend

def known(**more):
    script = lambda request: Fail(400) if request.number == 1 else Say("<b>", latency=more.pop("latency", 0))
    return dict(task="{input}", inputs=["a", "b", "c"], backend=ScriptedBackend(script), max_inflight=1, **more)
"""


def run_cells(*sources: str) -> list[list[dict[str, Any]]]:
    """The outputs of each cell, in a kernel of its own."""
    client = pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    nbformat = pytest.importorskip("nbformat")
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in sources])
    client.NotebookClient(notebook, timeout=120, kernel_name="python3").execute()
    return [json.loads(json.dumps(cell.outputs)) for cell in notebook.cells]


def test_a_kernel_shows_progress_that_ends_as_a_summary_and_results_as_html() -> None:
    _, awaited, sync, quick, two, plan = run_cells(
        SETUP,
        "results = await BatchAgent.run(**known(), progress=True)",
        "print('mine'); results = BatchAgent.run_sync(**known(), progress=True); results",
        "results = await BatchAgent.run(**known())",
        "import asyncio\nboth = await asyncio.gather(*(BatchAgent.run(**known(), progress=True) for _ in 'ab'))",
        "BatchAgent.plan(**known())",
    )
    (output,) = awaited
    assert output["output_type"] == "display_data"
    assert "failed   1 Rejected" in output["data"]["text/plain"]
    assert output["data"]["text/html"].startswith("<pre>3 rows in")
    assert [output["output_type"] for output in sync] == ["stream", "display_data", "execute_result"]
    assert sync[0]["text"] == "mine\n"
    assert "&lt;b&gt;" in sync[2]["data"]["text/html"]
    assert sync[2]["data"]["text/plain"] == "<Results: 3 rows, 2 ok, 1 failed (1 Rejected)>"
    assert quick == []  # it took less than a moment
    assert [output["output_type"] for output in two] == ["display_data"] * 2
    assert "First message" in plan[0]["data"]["text/html"]
