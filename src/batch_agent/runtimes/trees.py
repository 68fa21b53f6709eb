"""The files that a command-line agent works on: its own git worktree or copy, and the changes it made there.

Git runs without the hooks and helpers that a repository can configure: an agent may have written them.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Literal

from batch_agent.errors import SpecError, WorkerFailed

Isolation = Literal["worktree", "copy", "none"]
ATTEMPTS = 3
GIT = ("git", "-c", "core.hooksPath=/dev/null", "-c", "core.fsmonitor=false", "-c", "safe.directory=*")
DIFF = ("diff", "--cached", "--binary", "--no-ext-diff", "--no-textconv", "--no-color")


@dataclass(frozen=True, slots=True)
class AgentTree:
    """``cwd``: where the agent works; ``git``: the command that sees changes since ``base``, or empty."""

    cwd: Path
    git: tuple[str, ...] = ()
    base: str = ""

    def diff(self) -> str:
        """Return the agent's changes as a patch; "" for none."""
        if not self.git:
            return ""
        _git(*self.git, "add", "--all")
        return _git(*self.git, *DIFF, self.base)


def check_source(source: Path | None, isolation: Isolation) -> None:
    """Raise SpecError if ``source`` cannot be used with this isolation."""
    if source is None:
        return
    if not source.is_dir():
        raise SpecError(f"working_dir: {source} is not a directory")
    if isolation == "worktree":
        try:
            _git("-C", str(source), "rev-parse", "--verify", "HEAD")
        except WorkerFailed:
            raise SpecError(
                f"working_dir: {source} is not in a git repository with a commit; give isolation='copy'"
            ) from None


@contextmanager
def open_tree(source: Path | None, isolation: Isolation, place: Path, worktrees: Lock) -> Iterator[AgentTree]:
    """Create a tree at ``place`` from ``source`` as it is now, or an empty one, and remove it afterwards. ``worktrees``
    is held while the repository's list of worktrees changes, because git does not support concurrent changes."""
    if isolation == "none" and source is not None:
        yield AgentTree(source)
        return
    base = place.with_name("base.git")
    _remove(place, base, source, worktrees)
    try:
        if isolation == "worktree" and source is not None:
            with worktrees:
                tree = _worktree(source, place)
            yield tree
        else:
            yield _copy(source, place, base)
    finally:
        _remove(place, base, source, worktrees)


def _worktree(source: Path, place: Path) -> AgentTree:
    """Create a detached worktree at HEAD. Uncommitted changes are not in it."""
    at = ("-C", str(source))
    base = _git(*at, "rev-parse", "HEAD").strip()
    for left in reversed(range(ATTEMPTS)):
        try:
            _git(*at, "worktree", "add", "--detach", "--force", str(place), base)
            break
        except WorkerFailed:  # another process may be changing the list
            if not left:
                raise
    inside = _git(*at, "rev-parse", "--show-prefix").strip()
    return AgentTree(place / inside, ("-C", str(place)), base)


def _copy(source: Path | None, place: Path, base: Path) -> AgentTree:
    """Create a copy, and beside it a repository with its initial state."""
    if source is None:
        place.mkdir(parents=True)
    else:
        shutil.copytree(source, place, symlinks=True, ignore_dangling_symlinks=True)
    git = ("--git-dir", str(base), "--work-tree", str(place))
    _git("init", "--quiet", "--bare", str(base))
    _git(*git, "config", "core.bare", "false")
    _git(*git, "add", "--all")
    return AgentTree(place, git, _git(*git, "write-tree").strip())


def _remove(place: Path, base: Path, source: Path | None, worktrees: Lock) -> None:
    is_worktree = (place / ".git").is_file()
    shutil.rmtree(place, ignore_errors=True)
    shutil.rmtree(base, ignore_errors=True)
    if is_worktree and source is not None:
        with worktrees, suppress(WorkerFailed):
            _git("-C", str(source), "worktree", "prune")


def _git(*arguments: str) -> str:
    env = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    try:
        done = subprocess.run(
            [*GIT, *arguments],
            capture_output=True,
            env={**env, "GIT_CONFIG_NOSYSTEM": "1", "GIT_TERMINAL_PROMPT": "0"},
            stdin=subprocess.DEVNULL,
            check=False,
        )
    except FileNotFoundError:
        raise WorkerFailed("git is not installed: it is needed to record the changes of an agent") from None
    if done.returncode:
        raise WorkerFailed(f"git failed: {done.stderr.decode('utf-8', 'replace').strip()[-500:]}")
    return done.stdout.decode("utf-8", "surrogateescape")
