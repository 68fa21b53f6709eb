"""A command-line agent as the worker of a row: its files, environment, process and answer.

Each row has a directory (``ctx.workdir``) with its own home and file tree. The agent reaches the run's backend through
the gateway, so its model calls belong to the row. Its events, its standard error and its changes are artifacts of the
result.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import KW_ONLY, dataclass, field, replace
from pathlib import Path
from threading import Lock
from typing import ClassVar, Literal, Protocol, TypeAlias

from pydantic import JsonValue

from batch_agent.backends.base import Backend, ModelRequest, OnToolCall
from batch_agent.backends.http.backend import HttpBackend
from batch_agent.backends.http.wire import counted, json_of, mapping
from batch_agent.backends.registry import BACKEND_VARIABLE, open_backend
from batch_agent.children import open_guarded
from batch_agent.errors import AgentTimeout, Rejected, RowEnded, SpecError, WorkerFailed
from batch_agent.messages import JsonObject, Reply, Usage


@dataclass(slots=True)
class Transcript:
    """``text`` is the agent's last message, ``error`` the error that it reported."""

    text: str = ""
    error: str = ""
    usage: Usage = field(default_factory=Usage)


ReadEvent: TypeAlias = Callable[[Transcript, JsonObject], None]


def read_opencode(transcript: Transcript, event: JsonObject) -> None:
    """Read an event. The fields of a part may be in ``part``, or in the event itself."""
    part = mapping(event.get("part")) or event
    match event.get("type"):
        case "text":
            transcript.text = _string(part.get("text")) or transcript.text
        case "step_finish" | "step-finish":
            tokens = mapping(part.get("tokens"))
            cache = mapping(tokens.get("cache"))
            cached, written = counted(cache, "read"), counted(cache, "write")
            reasoning = counted(tokens, "reasoning")
            transcript.usage += Usage(
                counted(tokens, "input") + cached + written,
                cached,
                counted(tokens, "output") + reasoning,
                reasoning,
                written,
            )
        case "error":
            transcript.error = _error(event.get("error") or part)


def read_claude(transcript: Transcript, event: JsonObject) -> None:
    match event.get("type"):
        case "assistant":
            content = mapping(event.get("message")).get("content")
            for block in content if isinstance(content, list) else ():
                if isinstance(block, dict) and block.get("type") == "text":
                    transcript.text = _string(block.get("text")) or transcript.text
        case "result":
            transcript.text = _string(event.get("result")) or transcript.text
            if event.get("is_error") is True:
                transcript.error = _string(event.get("result")) or _string(event.get("subtype")) or "it failed"
            usage = event.get("usage")
            cached = counted(usage, "cache_read_input_tokens")
            written = counted(usage, "cache_creation_input_tokens")
            prompt = counted(usage, "input_tokens") + cached + written
            transcript.usage += Usage(prompt, cached, counted(usage, "output_tokens"), 0, written)


def read_codex(transcript: Transcript, event: JsonObject) -> None:
    match event.get("type"):
        case "item.completed":
            item = mapping(event.get("item"))
            if item.get("type") in ("agent_message", "assistant_message"):
                transcript.text = _string(item.get("text")) or transcript.text
        case "turn.completed":
            usage = event.get("usage")
            transcript.error = ""
            transcript.usage += Usage(
                counted(usage, "input_tokens"),
                counted(usage, "cached_input_tokens"),
                counted(usage, "output_tokens"),
                counted(usage, "reasoning_output_tokens"),
            )
        case "turn.failed":
            transcript.error = _error(event.get("error"))
        case "error":
            transcript.error = _string(event.get("message")) or _error(event)


def _string(value: JsonValue) -> str:
    return value if isinstance(value, str) else ""


def _error(value: JsonValue) -> str:
    """Return the message in an error object, wherever it is."""
    if isinstance(value, str):
        return value
    error = mapping(value)
    words = _string(error.get("message")) or _string(mapping(error.get("data")).get("message"))
    return words or _string(error.get("name")) or "it reported an error"


Permissions = Literal["read", "write", "full"]
KEPT_ENV = (
    *("PATH", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "SHELL", "USER", "LOGNAME"),
    *("SSL_CERT_FILE", "SSL_CERT_DIR", "NODE_EXTRA_CA_CERTS"),
    *("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"),
)
CHOICES = {"isolation": ("worktree", "copy", "none"), "permissions": ("read", "write", "full")}
LOCAL = "127.0.0.1,localhost"
LOGIN = "login"  # as a backend: the login of the command
DEFAULT_TIMEOUT = 1800.0
SPARE = 0.2  # fraction of the available memory that stays unused

LINE_BYTES = 16 * 1024 * 1024  # of one event; a longer one is ignored
TAIL_LINES = 20  # of standard error, for the message of a failed row

Isolation = Literal["worktree", "copy", "none"]
ATTEMPTS = 3
GIT = ("git", "-c", "core.hooksPath=/dev/null", "-c", "core.fsmonitor=false", "-c", "safe.directory=*")
DIFF = ("diff", "--cached", "--binary", "--no-ext-diff", "--no-textconv", "--no-color")


class RowContext(Protocol):
    """The part of an AgentContext that a runtime needs."""

    @property
    def prompt(self) -> str: ...
    @property
    def model(self) -> str: ...
    @property
    def workdir(self) -> Path: ...
    @property
    def base_url(self) -> str: ...
    @property
    def api_key(self) -> str: ...
    @property
    def env(self) -> Mapping[str, str]: ...
    def save(self, name: str, content: str | bytes | Path) -> Path: ...
    def add_usage(self, usage: Usage) -> None: ...


@dataclass(frozen=True, slots=True)
class Place:
    """Where an agent runs. ``home`` is its home directory. ``url`` (with ``/v1``) and ``key`` lead to its model; both
    are "" if the agent uses its own login."""

    home: Path
    url: str
    key: str
    model: str


class LoginBackend(Backend):
    """The backend of a run whose agents use their own login: the run itself sends nothing."""

    def __init__(self, agent: str) -> None:
        self._agent = agent

    @property
    def name(self) -> str:
        return f"the login of {self._agent}"

    async def models(self) -> list[str]:
        return [LOGIN]  # the agent chooses, unless the user names a model

    async def infer(self, request: ModelRequest, on_tool_call: OnToolCall | None = None) -> Reply:
        raise Rejected(f"{self._agent} uses its own login: the run has no backend for other requests")


@dataclass(frozen=True)
class CommandLineRuntime(ABC):
    """``working_dir`` is what the agent works on: a git repository with ``isolation="worktree"``, any directory with
    ``"copy"``; with ``"none"`` it works in the directory itself. None: an empty directory. ``permissions``: ``"read"``
    may only read, ``"write"`` may also change files, ``"full"`` may run any command. ``backend`` is the URL of a server
    that the agent uses directly, without the run's slots, budget and record; ``"login"``: the servers that the command
    itself is logged in to; None: the run's backend, through the gateway."""

    backend: str | None = None
    model: str | None = None
    _: KW_ONLY
    working_dir: str | Path | None = None
    isolation: Isolation = "worktree"
    permissions: Permissions = "read"
    timeout: float | None = DEFAULT_TIMEOUT
    extra_args: Sequence[str] = ()
    worktrees: Lock = field(default_factory=Lock, init=False, repr=False, compare=False)

    name: ClassVar[str]
    package: ClassVar[str]  # npm package
    memory_mib: ClassVar[int]  # memory of one agent
    provider_keys: ClassVar[Sequence[str]] = ("OPENAI_API_KEY",)  # variables with the key of a server over https
    read_event: ClassVar[ReadEvent]

    def __post_init__(self) -> None:
        for name, allowed in CHOICES.items():
            if getattr(self, name) not in allowed:
                raise SpecError(f"{name}: {getattr(self, name)!r} is not one of {', '.join(allowed)}")
        if self.timeout is not None and not self.timeout > 0:
            raise SpecError("timeout: it must be more than 0 seconds, or None")

    @property
    @abstractmethod
    def binary(self) -> str: ...

    @abstractmethod
    def command(self, program: str, place: Place) -> Sequence[str]:
        """Return the command line, without the prompt, which goes to standard input."""

    @abstractmethod
    def prepare(self, place: Place) -> Mapping[str, str]:
        """Write configuration files into the home. Returns environment variables."""

    @abstractmethod
    def login(self) -> Mapping[str, str] | None:
        """Return the environment variables with which the command finds the user's login, or None if there is none."""

    def resolved(self, run_backend: object) -> CommandLineRuntime:
        """Return the runtime for a run with this backend. If neither has one, a login of the command is used."""
        if self.backend is None and run_backend is None and not os.environ.get(BACKEND_VARIABLE) and self.login():
            return replace(self, backend=LOGIN)
        return self

    def own_backend(self) -> object:
        """Return the backend for a run that was given none."""
        return LoginBackend(self.name) if self.backend == LOGIN else self.backend

    def check(self) -> str:
        """Return the program's path. Raises SpecError if it is missing or the directory is unusable."""
        check_source(self._source, self.isolation)
        found = shutil.which(self.binary)
        if found is None:
            raise SpecError(f"{self.binary} is not installed: npm install -g {self.package}")
        if self.backend == LOGIN and self.login() is None:
            raise SpecError(f"{self.name} has no login here: start {self.binary} and log in, or give a backend")
        return found

    def most_at_once(self) -> int:
        """Return how many agents fit into the currently available memory."""
        return max(1, int(available_mib() * (1 - SPARE)) // self.memory_mib)

    @property
    def _source(self) -> Path | None:
        return None if self.working_dir is None else Path(self.working_dir).expanduser().resolve()

    # The worker

    async def __call__(self, row: object, ctx: RowContext) -> str:
        """Run the agent and return its last message."""
        program, home = await asyncio.to_thread(self.check), ctx.workdir.absolute() / "home"
        await asyncio.to_thread(_fresh, home)
        place, transcript = self._place(ctx, home), Transcript()
        async with self._tree(home.with_name("tree")) as tree:
            env = {**self._env(ctx, home), **self.prepare(place)}
            with (ctx.workdir / "events.jsonl").open("wb") as file:

                def take(line: bytes) -> None:
                    file.write(line)
                    event = json_of(line) if line.lstrip().startswith(b"{") else None
                    if isinstance(event, dict):  # other lines are no events
                        type(self).read_event(transcript, event)

                try:
                    ended = await self._run(self.command(program, place), tree, env, ctx, take)
                finally:
                    file.flush()
                    await asyncio.to_thread(_keep, ctx, tree)
        if self.backend is not None:
            ctx.add_usage(transcript.usage)
        return self._output(ended, transcript)

    @asynccontextmanager
    async def _tree(self, place: Path) -> AsyncIterator[AgentTree]:
        """Create the row's files, and remove them at the end, even if their creation is cancelled."""
        opened = open_tree(self._source, self.isolation, place, self.worktrees)
        making = asyncio.ensure_future(asyncio.to_thread(opened.__enter__))
        try:
            yield await asyncio.shield(making)
        finally:
            await asyncio.wait([making])
            if making.exception() is None:
                await asyncio.to_thread(opened.__exit__, None, None, None)

    def _place(self, ctx: RowContext, home: Path) -> Place:
        model = self.model or ctx.model
        if self.backend is None:
            return Place(home, ctx.base_url, ctx.api_key, model)
        if self.backend == LOGIN:
            return Place(home, "", "", "" if model == LOGIN else model)
        backend = open_backend(self.backend)[0]
        if not isinstance(backend, HttpBackend):
            raise SpecError(f"backend: {self.name} needs a server over HTTP, not {backend.name}")
        url = backend.client.base_url  # http://host:port/v1
        names = ("BATCH_AGENT_API_KEY", *(self.provider_keys if url.startswith("https://") else ()))
        return Place(home, url, next(filter(None, map(os.environ.get, names)), "none"), model)

    async def _run(
        self,
        command: Sequence[str],
        tree: AgentTree,
        env: Mapping[str, str],
        ctx: RowContext,
        on_line: Callable[[bytes], None],
    ) -> ProcessEnd:
        errors = ctx.workdir / "stderr.txt"
        limit = asyncio.timeout(self.timeout)
        try:
            async with limit:
                return await run_agent(
                    command, cwd=tree.cwd, env=env, prompt=ctx.prompt, errors=errors, on_line=on_line
                )
        except TimeoutError:
            if not limit.expired():
                raise
            raise AgentTimeout(f"{self.name} did not end in its timeout, {self.timeout:g} s") from None

    def _env(self, ctx: RowContext, home: Path) -> dict[str, str]:
        """Return the agent's environment, without secrets of this process: an agent's commands could read them."""
        kept = {name: os.environ[name] for name in KEPT_ENV if name in os.environ}
        homes = {
            name: str(home / sub)
            for name, sub in {
                "XDG_CONFIG_HOME": ".config",
                "XDG_DATA_HOME": ".local/share",
                "XDG_STATE_HOME": ".local/state",
                "XDG_CACHE_HOME": ".cache",
                "TMPDIR": "tmp",
            }.items()
        }
        local = {"NO_PROXY": LOCAL, "no_proxy": LOCAL, "TERM": "dumb", "NO_COLOR": "1", "CI": "1"}
        gateway = {} if self.backend == LOGIN else ctx.env
        return {**kept, "HOME": str(home), **homes, **local, **gateway}

    def _output(self, ended: ProcessEnd, transcript: Transcript) -> str:
        if ended.status or transcript.error or not transcript.text:
            how = f"{self.name} exited with status {ended.status}" if ended.status else f"{self.name} gave no answer"
            why = [how, transcript.error, ended.tail and f"standard error ends in:\n{ended.tail}"]
            raise WorkerFailed(": ".join(filter(None, why)))
        return transcript.text


def _fresh(home: Path) -> None:
    """Create an empty home, without leftovers of an interrupted attempt."""
    shutil.rmtree(home, ignore_errors=True)
    (home / "tmp").mkdir(parents=True, mode=0o700)


def _keep(ctx: RowContext, tree: AgentTree) -> None:
    """Keep the agent's output as artifacts, even if the agent failed. A row that has ended already keeps nothing."""
    with suppress(RowEnded):
        if tree.git:
            ctx.save("diff.patch", tree.diff().encode("utf-8", "surrogateescape"))
        for name in ("events.jsonl", "stderr.txt"):
            if (ctx.workdir / name).exists():
                ctx.save(name, ctx.workdir / name)


def available_mib() -> int:
    """Return the available memory, within the limit of a container."""
    try:
        lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        free = int(lines["MemAvailable"].split()[0]) // 1024
    except (OSError, KeyError, ValueError):
        free = 4096
    try:
        limit = int(Path("/sys/fs/cgroup/memory.max").read_text())
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
    except (OSError, ValueError):
        return free  # no limit
    return min(free, max(0, limit - used) // 1024**2)


@dataclass(frozen=True, slots=True)
class ProcessEnd:
    """How an agent's process ended: 0 is success. ``tail`` is the end of its standard error."""

    status: int
    tail: str


async def run_agent(
    command: Sequence[str],
    *,
    cwd: Path,
    env: Mapping[str, str],
    prompt: str,
    errors: Path,
    on_line: Callable[[bytes], None],
) -> ProcessEnd:
    """Run the command until it ends; standard error goes to the file ``errors``. If this is cancelled, or this process
    dies, everything that the command started is killed."""
    pipe = asyncio.subprocess.PIPE
    with errors.open("wb") as file:
        opened = open_guarded(command, cwd=cwd, env=env, stdin=pipe, stdout=pipe, stderr=file, limit=LINE_BYTES)
        async with opened as process, asyncio.TaskGroup() as tasks:
            tasks.create_task(_feed(process, prompt.encode("utf-8", "replace")))
            tasks.create_task(_read(process, on_line))
            status = await process.wait()
    return ProcessEnd(status, tail_of(errors))


async def _feed(process: asyncio.subprocess.Process, prompt: bytes) -> None:
    assert process.stdin is not None
    with suppress(ConnectionError):  # an agent may not read its whole input
        process.stdin.write(prompt)
        await process.stdin.drain()
    process.stdin.close()


async def _read(process: asyncio.subprocess.Process, on_line: Callable[[bytes], None]) -> None:
    assert process.stdout is not None
    while True:
        try:
            line = await process.stdout.readline()
        except ValueError:
            continue  # longer than the limit: the buffered part is dropped
        if not line:
            return
        on_line(line)


def tail_of(file: Path) -> str:
    with suppress(OSError), file.open("rb") as opened:
        opened.seek(max(0, file.stat().st_size - 64 * 1024))
        lines = deque(opened.read().decode("utf-8", "replace").splitlines(), TAIL_LINES)
        return "\n".join(lines).strip()
    return ""


# Git runs without the hooks and helpers that a repository can configure: an agent may have written them.
@dataclass(frozen=True, slots=True)
class AgentTree:
    """The files of a row. ``cwd``: where the agent works. ``git``: the command that shows changes since ``base``; empty
    without git."""

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
    """Create a tree at ``place`` from the present state of ``source``, or an empty one, and remove it afterwards.
    ``worktrees`` is held while the repository's list of worktrees changes, because git does not support concurrent
    changes."""
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
