"""The public API: ``BatchAgent.run``, ``stream``, ``open``, ``run_sync``, ``plan``; its ``run_with_reduce`` and
``run_with_map_reduce`` are in ``topology.methods``.

Each takes the options of BatchSpec as keywords, or a BatchSpec. ``options.py`` repeats their names for type
checkers, so that the type of ``output_schema`` reaches ``result.output``. The engine is imported by the first run, not
with this module.
"""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import (
    AsyncGenerator,
    Coroutine,
    Iterator,
    Sequence,
)
from concurrent.futures import Future, wait
from contextlib import aclosing, contextmanager, suppress
from typing import TYPE_CHECKING, Any, TypeVar, Unpack, overload

from batch_agent.documented import documented
from batch_agent.errors import SpecError
from batch_agent.job import AgentResult
from batch_agent.options import EveryOption, Options
from batch_agent.topology.methods import MapReduce

if TYPE_CHECKING:
    from pathlib import Path

    from batch_agent.cluster.worker import WorkReport
    from batch_agent.engine.run.interruption import Interruption
    from batch_agent.engine.run.prepare import Prepared
    from batch_agent.engine.run.run import Run
    from batch_agent.events import Sink
    from batch_agent.observe.metrics import Statistics
    from batch_agent.options import Worker
    from batch_agent.results import Results
    from batch_agent.spec import BatchSpec

T = TypeVar("T")
R = TypeVar("R")


@documented(EveryOption, "run", "stream", "open", "run_sync", "plan")
class BatchAgent(MapReduce):
    """Run one task over many inputs. Nothing here holds state: two runs in one process share nothing."""

    @overload
    @classmethod
    async def run(
        cls,
        *,
        output_schema: type[T],
        worker: Worker | None = None,
        progress: bool | None = None,
        view: bool = False,
        **options: Unpack[Options],
    ) -> Results[T]: ...
    @overload
    @classmethod
    async def run(
        cls, *, output_schema: None = None, progress: bool | None = None, view: bool = False, **options: Unpack[Options]
    ) -> Results[str]: ...
    @overload
    @classmethod
    async def run(
        cls,
        *,
        worker: Worker,
        output_schema: None = None,
        progress: bool | None = None,
        view: bool = False,
        **options: Unpack[Options],
    ) -> Results[Any]: ...
    @overload
    @classmethod
    async def run(cls, spec: BatchSpec, *, progress: bool | None = None, view: bool = False) -> Results[Any]: ...
    @overload
    @classmethod
    async def run(
        cls,
        *,
        output_schema: Any,
        worker: Worker | None = None,
        progress: bool | None = None,
        view: bool = False,
        **options: Unpack[Options],
    ) -> Results[Any]: ...
    @classmethod
    async def run(
        cls, spec: BatchSpec | None = None, *, progress: bool | None = None, view: bool = False, **options: Any
    ) -> Results[Any]:
        """All results, in input order. Failed jobs are results too; only a run that cannot go on raises.

        ``progress`` shows the run as it goes, on standard error or in the notebook: True from its start, False never;
        not given, where there is a terminal or a notebook and the run takes more than a moment. ``view`` serves the
        run's page and shows its address; it needs ``run_dir``, and is served for as long as the results are kept.
        """
        checked = _spec(spec, options)
        return await _collect(cls._open(checked), checked, progress, view, _interruption())

    @overload
    @classmethod
    def stream(
        cls, *, output_schema: type[T], worker: Worker | None = None, **options: Unpack[Options]
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
        cls, *, output_schema: Any, worker: Worker | None = None, **options: Unpack[Options]
    ) -> AsyncGenerator[AgentResult[Any], None]: ...
    @classmethod
    def stream(cls, spec: BatchSpec | None = None, **options: Any) -> AsyncGenerator[AgentResult[Any], None]:
        """Each result as it finishes. Leaving the loop early cancels what is left."""
        checked = _spec(spec, options)
        return ResultStream(cls._open(checked), checked)

    @overload
    @classmethod
    def open(
        cls,
        *,
        output_schema: type[T],
        worker: Worker | None = None,
        **options: Unpack[Options],
    ) -> Run[T]: ...
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
    def open(
        cls,
        *,
        output_schema: Any,
        worker: Worker | None = None,
        **options: Unpack[Options],
    ) -> Run[Any]: ...
    @classmethod
    def open(cls, spec: BatchSpec | None = None, **options: Any) -> Run[Any]:
        """A run to steer: ``async with BatchAgent.open(...) as run``. ``sinks`` are called with every event, beside
        those of a BatchSpec."""
        return cls._open(_spec(spec, options))

    @overload
    @classmethod
    def run_sync(
        cls,
        *,
        output_schema: type[T],
        worker: Worker | None = None,
        progress: bool | None = None,
        view: bool = False,
        **options: Unpack[Options],
    ) -> Results[T]: ...
    @overload
    @classmethod
    def run_sync(
        cls, *, output_schema: None = None, progress: bool | None = None, view: bool = False, **options: Unpack[Options]
    ) -> Results[str]: ...
    @overload
    @classmethod
    def run_sync(
        cls,
        *,
        worker: Worker,
        output_schema: None = None,
        progress: bool | None = None,
        view: bool = False,
        **options: Unpack[Options],
    ) -> Results[Any]: ...
    @overload
    @classmethod
    def run_sync(cls, spec: BatchSpec, *, progress: bool | None = None, view: bool = False) -> Results[Any]: ...
    @overload
    @classmethod
    def run_sync(
        cls,
        *,
        output_schema: Any,
        worker: Worker | None = None,
        progress: bool | None = None,
        view: bool = False,
        **options: Unpack[Options],
    ) -> Results[Any]: ...
    @classmethod
    def run_sync(
        cls, spec: BatchSpec | None = None, *, progress: bool | None = None, view: bool = False, **options: Any
    ) -> Results[Any]:
        """``run`` for scripts and notebooks, also where an event loop is already running."""
        checked, interruption = _spec(spec, options), _interruption()
        return _run_anywhere(_collect(cls._open(checked), checked, progress, view, interruption), interruption)

    @classmethod
    def plan(cls, spec: BatchSpec | None = None, **options: Any) -> Prepared:
        """What a run would do, fully resolved and checked; nothing is sent, so no key is needed.

        Print it: it says how many rows there are, what all of them share, the first message in full, and what tokens
        and cost are to be expected. An iterator is not read.
        """
        from batch_agent.engine.run.prepare import prepare

        return prepare(_spec(spec, options), sends=False)

    @staticmethod
    def _open(spec: BatchSpec) -> Run[Any]:
        from batch_agent.engine.run.prepare import prepare
        from batch_agent.engine.run.run import Run
        from batch_agent.store.address import is_store_url

        if spec.cluster is not None:
            opened: Run[Any] = spec.cluster.open_run(prepare(spec))
            return opened
        if is_store_url(spec.run_dir):
            from batch_agent.cluster.open import open_fed_run

            return open_fed_run(prepare(spec))
        return Run(prepare(spec))

    @staticmethod
    async def work(url: str, *, import_from: str | Path | None = None, wait: float = 60.0) -> WorkReport:
        """Join the run at ``url`` (``redis://host:6379/0/NAME``) that another process feeds, and work until it is done.

        The user's modules are imported from ``import_from``, else from the working directory. ``wait`` is how many
        seconds a run, or a feeder that is gone, is waited for. Raises SpecError when this process cannot work on the
        run, and StoreError when there is none to work on.
        """
        from batch_agent.cluster.worker import work

        return await work(url, import_from=import_from, wait=wait)


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
    """Paths and tables are looked at once, when the run is prepared."""
    if isinstance(spec.inputs, list | tuple):
        return spec
    from batch_agent.files.inputs import rows_from

    return spec.model_copy(update={"inputs": rows_from(spec.inputs)})


def _interruption() -> Interruption:
    from batch_agent.engine.run.interruption import Interruption

    return Interruption()


async def _collect(
    run: Run[R], spec: BatchSpec, progress: bool | None, wants_page: bool, interruption: Interruption
) -> Results[R]:
    from batch_agent.engine.run.interruption import interrupted_words
    from batch_agent.files.read import LazyRows
    from batch_agent.observe.display import with_expected
    from batch_agent.observe.progress import Progress, show_address
    from batch_agent.results import Results, Summary, with_unfinished
    from batch_agent.view.beside import PageBeside

    page = PageBeside(spec.run_dir) if wants_page else None
    if page is not None and (address := await page.open()):
        show_address(address)

    def statistics() -> Statistics:
        expected = spec.inputs.expected_rows() if isinstance(spec.inputs, LazyRows) else None
        return with_expected(run.statistics(), expected)

    def summary() -> Summary:
        return Summary(statistics(), run.tool_statistics())

    view = Progress(progress, statistics)
    taken: list[AgentResult[R]] = []

    try:
        async with run, view:
            with interruption.stopping(run.cancel):
                async for result in run.results():
                    taken.append(result)
    except BaseException as error:
        if statistics().done:  # how far it came
            view.conclude(str(summary()))
        with suppress(AttributeError, TypeError):  # an exception of foreign code may have no room for it
            done = sorted(taken, key=lambda result: result.index)
            error.results = Results(done, summary(), spec.output_schema, page)  # type: ignore[attr-defined]
        raise
    view.conclude(str(summary()))
    rows = with_unfinished(taken, spec.inputs, statistics(), spec.id_column)
    results = Results(rows, summary(), spec.output_schema, page)
    if interruption.happened:
        return interruption.conclude(results, results, interrupted_words(statistics(), spec))
    return results


class ResultStream(AsyncGenerator[AgentResult[R], None]):
    """What ``stream`` returns. Dropping it, as ``break`` does, stops the run at once: a plain generator would only be
    closed some turns of the event loop later, and requests would leave meanwhile."""

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
    from batch_agent.engine.run.interruption import interrupted_words

    interruption = _interruption()
    async with run, aclosing(run.results()) as results:
        with interruption.stopping(run.cancel):
            async for result in results:
                yield result
    if interruption.happened:
        interruption.conclude(None, None, interrupted_words(run.statistics(), spec))


def _run_anywhere(work: Coroutine[Any, Any, R], interruption: Interruption) -> R:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    # A notebook: its loop cannot be entered again, so the run gets a thread and a loop of its own.
    outcome: Future[R] = Future()  # waited for instead of the thread: an interrupted join takes a thread for ended
    loop = asyncio.new_event_loop()
    task = loop.create_task(work)

    def drive() -> None:
        try:
            with asyncio.Runner(loop_factory=lambda: loop) as runner:
                value = runner.run(_await(task))
        except BaseException as error:  # handed to the calling thread, which raises it
            outcome.set_exception(error)
        else:
            outcome.set_result(value)

    thread = threading.Thread(target=drive, name="batch-agent run_sync", daemon=True)
    with _interruptible():
        try:
            thread.start()
            try:
                return outcome.result()
            except KeyboardInterrupt:  # the first one: the run ends with what is done
                if not interruption.request():
                    raise
                return outcome.result()
        except BaseException:
            with suppress(RuntimeError):  # its loop is closed: it has ended by itself
                loop.call_soon_threadsafe(task.cancel)
            if thread.ident is not None:  # there may be no thread to be had
                wait([outcome])
            raise


@contextmanager
def _interruptible() -> Iterator[None]:
    """Ctrl-C raises KeyboardInterrupt here. The handler of ``asyncio.run`` would cancel a task of the loop instead, and
    that loop is the one that waits for us."""
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):  # ignored, or not Python's
        yield
        return
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)


async def _await(task: asyncio.Task[R]) -> R:
    return await task
