"""The page of a run of this process, served by another process, so that it does not slow the run down."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path
from urllib.parse import quote

from batch_agent.blocking import in_thread
from batch_agent.errors import SpecError
from batch_agent.record.address import PASSWORD_VARIABLE, StoreAddress, place_of

logger = logging.getLogger("batch_agent")


class PageBeside:
    """The page. ``address`` is "" until it is open. It is served until ``close``, or until this process ends."""

    _process: subprocess.Popen[str] | None = None

    def __init__(self, run_dir: str | Path | None) -> None:
        if run_dir is None:
            raise SpecError("the page reads the record of the run: give run_dir, or omit view")
        self._place = place_of(run_dir)
        self.address = ""

    async def open(self) -> str:
        """Start the page and return its address; "" if it cannot be served."""
        self.address = await in_thread(self._start)
        if not self.address:
            logger.warning("the page of %s cannot be served; the run continues without it", self._place)
        return self.address

    def _start(self) -> str:
        place = str(self._place)
        if isinstance(self._place, StoreAddress) and self._place.user:
            place = place.replace("://", f"://{quote(self._place.user, safe='')}@", 1)
        command = [sys.executable, "-m", "batch_agent", "view", place, "--beside"]
        # The page uses the same code as this process.
        paths = [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
        if isinstance(self._place, StoreAddress) and self._place.password:
            environment[PASSWORD_VARIABLE] = self._place.password  # arguments are visible to other users
        # A new session: Ctrl-C is for the run. The page ends when its standard input is closed.
        self._process = process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env=environment,
        )
        assert process.stdout is not None
        return process.stdout.readline().strip()

    def close(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.terminate()
            process.communicate()

    def __del__(self) -> None:
        self.close()
