"""The public API: ``BatchAgent.run``, ``stream``, ``open``, ``run_sync`` and ``plan``. ``topology.methods`` has
``run_with_reduce`` and ``run_with_map_reduce``.

Each takes the options of BatchSpec as keywords, or a BatchSpec. ``options.py`` repeats their names for type
checkers, so that ``result.output`` has the type of ``output_schema``. The first run imports the engine; this module
does not.
"""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import AsyncGenerator, Coroutine, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import aclosing, contextmanager, suppress
from typing import TYPE_CHECKING, Any, TypeVar, Unpack, overload

from batch_agent.documented import documented
from batch_agent.errors import SpecError
from batch_agent.job import AgentResult
from batch_agent.options import EveryOption, EveryShownOption, Options, ShownOptions
from batch_agent.topology.methods import MapReduce

if TYPE_CHECKING:
    from pathlib import Path

    from batch_agent.agent.prepare import Prepared
    from batch_agent.events import Sink
    from batch_agent.options import Worker
    from batch_agent.results import Results
    from batch_agent.run.interruption import Interruption
    from batch_agent.run.joined_worker import WorkReport
    from batch_agent.run.run import Run
    from batch_agent.spec import BatchSpec

T = TypeVar("T")
R = TypeVar("R")


@documented(EveryOption, "run", "stream", "open", "run_sync", "plan")
class BatchAgent(MapReduce):
    """Run one task over many inputs. The class has no state: two runs in one process share nothing."""

    @overload
    @classmethod
    async def run(cls, *, output_schema: type[T], **options: Unpack[EveryShownOption]) -> Results[T]: ...
    @overload
    @classmethod
    async def run(cls, *, output_schema: None = None, **options: Unpack[ShownOptions]) -> Results[str]: ...
    @overload
    @classmethod
    async def run(
        cls, *, worker: Worker, output_schema: None = None, **options: Unpack[ShownOptions]
    ) -> Results[Any]: ...
    @overload
    @classmethod
    async def run(cls, spec: BatchSpec, *, progress: bool | None = None, view: bool = False) -> Results[Any]: ...
    @overload
    @classmethod
    async def run(cls, *, output_schema: Any, **options: Unpack[EveryShownOption]) -> Results[Any]: ...
    @classmethod
    async def run(
        cls, spec: BatchSpec | None = None, *, progress: bool | None = None, view: bool = False, **options: Any
    ) -> Results[Any]:
        """Return all results, in input order. A failed row is a result too; only a run that cannot continue raises.

        ``progress`` shows the progress on standard error or in the notebook: True always, False never. By default it
        is shown in a terminal or a notebook if the run takes more than a moment. ``view`` serves a page about the run
        and shows its address. It needs ``run_dir``. The page is served until the returned results are discarded.
        """
        checked = _spec(spec, options)
        return await _collect(cls._open(checked), checked, progress, view, _interruption())

    @overload
    @classmethod
    def stream(
        cls, *, output_schema: type[T], **options: Unpack[EveryOption]
    ) -> AsyncGenerator[AgentResult[T], None]: ...
    @overload
    @classmethod
    def stream(
        cls, *, output_schema: None = None, **options: Unpack[Options]
    ) -> AsyncGenerator[AgentResult[str], None]: ...
    @overload
    @classmethod
    def stream(
        cls, *, worker: Worker, output_schema: None = None, **options: Unpack[Options]
    ) -> AsyncGenerator[AgentResult[Any], None]: ...
    @overload
    @classmethod
    def stream(cls, spec: BatchSpec, *, sinks: Sequence[Sink] = ()) -> AsyncGenerator[AgentResult[Any], None]: ...
    @overload
    @classmethod
    def stream(
        cls, *, output_schema: Any, **options: Unpack[EveryOption]
    ) -> AsyncGenerator[AgentResult[Any], None]: ...
    @classmethod
    def stream(cls, spec: BatchSpec | None = None, **options: Any) -> AsyncGenerator[AgentResult[Any], None]:
        """Yield each result when its row finishes. Leaving the loop early cancels the other rows."""
        checked = _spec(spec, options)
        return ResultStream(cls._open(checked), checked)

    @overload
    @classmethod
    def open(cls, *, output_schema: type[T], **options: Unpack[EveryOption]) -> Run[T]: ...
    @overload
    @classmethod
    def open(cls, *, output_schema: None = None, **options: Unpack[Options]) -> Run[str]: ...
    @overload
    @classmethod
    def open(cls, *, worker: Worker, output_schema: None = None, **options: Unpack[Options]) -> Run[Any]: ...
    @overload
    @classmethod
    def open(cls, spec: BatchSpec, *, sinks: Sequence[Sink] = ()) -> Run[Any]: ...
    @overload
    @classmethod
    def open(cls, *, output_schema: Any, **options: Unpack[EveryOption]) -> Run[Any]: ...
    @classmethod
    def open(cls, spec: BatchSpec | None = None, **options: Any) -> Run[Any]:
        """Return a run that you can control: ``async with BatchAgent.open(...) as run``. ``sinks`` are called with
        each event, in addition to the sinks of the BatchSpec."""
        return cls._open(_spec(spec, options))

    @overload
    @classmethod
    def run_sync(cls, *, output_schema: type[T], **options: Unpack[EveryShownOption]) -> Results[T]: ...
    @overload
    @classmethod
    def run_sync(cls, *, output_schema: None = None, **options: Unpack[ShownOptions]) -> Results[str]: ...
    @overload
    @classmethod
    def run_sync(
        cls, *, worker: Worker, output_schema: None = None, **options: Unpack[ShownOptions]
    ) -> Results[Any]: ...
    @overload
    @classmethod
    def run_sync(cls, spec: BatchSpec, *, progress: bool | None = None, view: bool = False) -> Results[Any]: ...
    @overload
    @classmethod
    def run_sync(cls, *, output_schema: Any, **options: Unpack[EveryShownOption]) -> Results[Any]: ...
    @classmethod
    def run_sync(
        cls, spec: BatchSpec | None = None, *, progress: bool | None = None, view: bool = False, **options: Any
    ) -> Results[Any]:
        """Return what ``run`` returns, without ``await``: for scripts, and for notebooks with a running event loop."""
        checked, interruption = _spec(spec, options), _interruption()
        return _run_anywhere(_collect(cls._open(checked), checked, progress, view, interruption), interruption)

    @classmethod
    def plan(cls, spec: BatchSpec | None = None, **options: Any) -> Prepared:
        """Return what a run would do, resolved and checked. Nothing is sent, so no key is needed.

        Print it to see the number of rows, the text that all rows share, the first message in full, and the expected
        tokens and cost. An iterator is not read.
        """
        from batch_agent.agent.prepare import prepare

        return prepare(_spec(spec, options), sends=False)

    @staticmethod
    def _open(spec: BatchSpec) -> Run[Any]:
        from batch_agent.agent.prepare import prepare
        from batch_agent.run.run import Run

        return Run(prepare(spec))

    @staticmethod
    async def work(
        url: str,
        *,
        import_from: str | Path | None = None,
        wait: float = 60.0,
        allow: Sequence[str] = (),
        trust: str = "",
    ) -> WorkReport:
        """Join the run at ``url`` that another process feeds, and work until it is done. It is
        ``redis://host:6379/0/NAME``, or the run directory of a run on this machine.

        The user's modules are imported from ``import_from``, or from the working directory. ``wait`` is how many
        seconds to wait for the run to appear, or for a lost feeder to return. Of a record in Redis, this process uses
        only the commands, addresses and modules that the patterns ``allow`` allow, or all of them if ``trust`` is the
        fingerprint that the feeder printed, or if both have one ``BATCH_AGENT_CLUSTER_SECRET``. Raises SpecError if
        this process cannot work on the run, and StoreError if there is no run.
        """
        from batch_agent.run.joined_worker import work

        return await work(url, import_from=import_from, wait=wait, allow=allow, trust=trust)


def _spec(spec: BatchSpec | None, options: dict[str, Any]) -> BatchSpec:
    from batch_agent.spec import BatchSpec

    if spec is None:
        return _with_rows(BatchSpec(**options))
    if not isinstance(spec, BatchSpec):
        raise SpecError(f"a run takes keywords or a BatchSpec, not {type(spec).__name__}")
    if sinks := options.pop("sinks", ()):
        spec = spec.model_copy(update={"sinks": (*spec.sinks, *sinks)})
    if options:
        raise SpecError(f"give a BatchSpec or keywords, not both: {', '.join(options)}")
    return _with_rows(spec)


def _with_rows(spec: BatchSpec) -> BatchSpec:
    """Return the spec with its inputs as rows. Paths and tables are opened once, here."""
    if isinstance(spec.inputs, list | tuple):
        return spec
    from batch_agent.files.inputs import rows_from

    return spec.model_copy(update={"inputs": rows_from(spec.inputs)})


def _interruption() -> Interruption:
    from batch_agent.run.interruption import Interruption

    return Interruption()


async def _collect(
    run: Run[R], spec: BatchSpec, progress: bool | None, wants_page: bool, interruption: Interruption
) -> Results[R]:
    from batch_agent.observe.progress import show_address
    from batch_agent.run.collecting import RunCollecting
    from batch_agent.view.beside import PageBeside

    page = PageBeside(spec.run_dir) if wants_page else None
    if page is not None and (address := await page.open()):
        show_address(address)
    return await RunCollecting(run, spec, page).collect(progress, interruption)


class ResultStream(AsyncGenerator[AgentResult[R], None]):
    """The results that ``stream`` returns. ``break`` deletes it, and ``__del__`` then stops the run at once. Of a plain
    generator, the event loop would run the ``finally`` only later, and the run would send more requests until then."""

    def __init__(self, run: Run[R], spec: BatchSpec) -> None:
        self._run = run
        self._results = _results(run, spec)

    async def asend(self, value: None) -> AgentResult[R]:
        return await self._results.asend(value)

    async def athrow(self, kind: Any, value: Any = None, trace: Any = None) -> AgentResult[R]:
        return await self._results.athrow(kind, value, trace)

    async def aclose(self) -> None:
        await self._results.aclose()

    def __del__(self) -> None:
        self._run.stop()


async def _results(run: Run[R], spec: BatchSpec) -> AsyncGenerator[AgentResult[R], None]:
    from batch_agent.run.interruption import interrupted_words

    interruption = _interruption()
    async with run, aclosing(run.results()) as results:
        with interruption.stopping(run.cancel):
            async for result in results:
                yield result
    if interruption.happened:
        interruption.conclude(None, None, interrupted_words(run.statistics(), spec))


def _run_anywhere(work: Coroutine[Any, Any, R], interruption: Interruption) -> R:
    if asyncio._get_running_loop() is None:  # outside of an except clause, which tracebacks of workers would show
        return asyncio.run(work)
    # A notebook: its event loop is already running, so the run gets its own thread and loop.
    outcome: Future[R] = Future()  # awaited instead of the thread: an interrupted join marks the thread as ended
    loop = asyncio.new_event_loop()
    task = loop.create_task(work)

    def drive() -> None:
        try:
            with asyncio.Runner(loop_factory=lambda: loop) as runner:
                value = runner.run(_await(task))
        except BaseException as error:  # the calling thread raises it  # noqa: BLE001
            outcome.set_exception(error)
        else:
            outcome.set_result(value)

    thread = threading.Thread(target=drive, name="batch-agent run_sync", daemon=True)
    with _interruptible():
        try:
            thread.start()
            try:
                return outcome.result()
            except KeyboardInterrupt:  # the first Ctrl-C: the run ends with the finished rows
                if not interruption.request():
                    raise
                return outcome.result()
        except BaseException:
            with suppress(RuntimeError):  # the loop is closed: the run has already ended
                loop.call_soon_threadsafe(task.cancel)
            if thread.ident is not None:  # starting the thread may have failed
                wait([outcome])
            raise


@contextmanager
def _interruptible() -> Iterator[None]:
    """Let Ctrl-C raise KeyboardInterrupt in this block. Otherwise the handler of ``asyncio.run`` would cancel a task of
    the outer loop, which is blocked until the run ends."""
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(
        handler
    ):  # SIGINT is ignored, or the handler is not Python's
        yield
        return
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)


async def _await(task: asyncio.Task[R]) -> R:
    return await task
