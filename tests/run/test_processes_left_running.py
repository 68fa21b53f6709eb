"""What the tools of worker processes leave running holds up neither the run nor the restart of a worker."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.run.process_work import ROOT

from batch_agent import BatchAgent, Tool
from batch_agent.testing import CallTools, Request, Say, ScriptedServer, ToolUse
from batch_agent.testing.replies import ScriptedReply

PIDS = "BATCH_AGENT_TEST_PIDS"  # names the file with the ids of the processes that the tool leaves behind


@Tool.define(effect="read")
def leave_one_behind(row: str) -> str:
    """Start a process that never ends, in a session of its own. For the row "crash" then end this worker, once."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    place = Path(os.environ[PIDS])
    with place.open("a") as file:
        file.write(f"{child.pid}\n")
    if row == "crash" and not (crashed := place.with_name("crashed")).exists():
        crashed.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return "left"


def is_running(pid: int) -> bool:
    """Return whether a process runs; one that nobody has reaped yet does not."""
    status = Path(f"/proc/{pid}/status")
    return status.exists() and "State:\tZ" not in status.read_text()


async def test_a_crash_is_noticed_and_a_run_ends_although_children_of_its_workers_still_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(PIDS, str(tmp_path / "pids"))
    monkeypatch.syspath_prepend(ROOT)

    def script(request: Request) -> ScriptedReply:
        return Say("done") if request.turn else CallTools(ToolUse("leave_one_behind", {"row": request.text}))

    with caplog.at_level(logging.WARNING):
        async with ScriptedServer(script, models=["m"]) as server, asyncio.timeout(60):
            results = await BatchAgent.run(
                task="{input}",
                inputs=["crash", "other"],
                backend=server.backend_url,
                model="m",
                tools=[leave_one_behind],
                processes=1,
                lease=2.0,
                run_dir=tmp_path / "run",
            )
    assert [result.output for result in results] == ["done", "done"]
    assert "worker process 0 is started again: it was ended by signal 9" in caplog.text
    pids = [int(line) for line in (tmp_path / "pids").read_text().split()]
    assert len(pids) >= 3, "the row whose worker crashed was continued"
    for pid in pids:
        assert f"(process {pid}) running: it is ended" in caplog.text
        assert not is_running(pid)
