"""Settings of Hypothesis, and a Redis, for all tests. No test asserts a time, so a busy machine must not fail one.
Tests that need more examples than these set their own number."""

import gc
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from tests.examples import SEARCHES, examples
from tests.record.redis_servers import RedisServer, needs_redis, redis_server
from tests.warm import share

# The assertions of the contract tell both sides when they fail, as those of test modules do.
pytest.register_assert_rewrite("batch_agent.testing.contract")
settings.register_profile(
    "any machine",
    max_examples=examples(50),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    derandomize=not SEARCHES,  # `make test` gives one answer; `make soak` searches
)
settings.load_profile("any machine")

# A disk would take most of the time for syncing records, and a third of the CPU time of a recorded run.
MEMORY, ROOM_BYTES = Path("/dev/shm"), 2 << 30
NAMES = (f"run-{number}" for number in count())


@pytest.fixture(scope="module")
def openai() -> Any:
    """The client of OpenAI. Importing it takes a second, which only the tests that use it should cost."""
    return pytest.importorskip("openai", reason="OpenAI's client is not installed")


@pytest.fixture(scope="module")
def anthropic() -> Any:
    """The client of Anthropic, which takes two seconds to import."""
    return pytest.importorskip("anthropic", reason="Anthropic's client is not installed")


@pytest.fixture(scope="module")
def stats() -> Any:
    """The distributions of scipy, which take half a second to import."""
    return pytest.importorskip("scipy.stats")


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with redis_server(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture
def state(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of a ledger of looks that this test alone has."""
    directory = tmp_path_factory.mktemp("state")
    monkeypatch.setenv("XDG_STATE_HOME", str(directory))
    return directory / "batch-agent"


@pytest.fixture
def url(redis: RedisServer) -> str:
    """The URL of a run that does not exist yet."""
    return f"{redis.url}/{next(NAMES)}"


@pytest.fixture(params=["directory", pytest.param("redis", marks=needs_redis)])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Where a run may be recorded that does not exist yet: a directory, and Redis."""
    return str(tmp_path / "run" if request.param == "directory" else request.getfixturevalue("url"))


def pytest_configure(config: pytest.Config) -> None:
    """Take signals as a terminal's programs do: a shell's background job and ``nohup`` ignore some, and so would the
    processes that tests start and interrupt."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    gc.disable()  # collections while the modules are imported find no garbage; they take a tenth of the time
    if MEMORY.is_dir() and shutil.disk_usage(MEMORY).free > ROOM_BYTES:
        os.environ["TMPDIR"], tempfile.tempdir = str(MEMORY), None
    os.environ["XDG_STATE_HOME"] = tempfile.mkdtemp(prefix="batch-agent-test-state-")  # not the user's ledger of looks
    if config.getoption("numprocesses", None):
        share()


def pytest_unconfigure() -> None:
    shutil.rmtree(os.environ["XDG_STATE_HOME"], ignore_errors=True)


def pytest_collection_finish() -> None:
    """Leave what was imported out of later garbage collections: it is most of the objects, and never garbage. Collect
    rarely: 10,000 instead of Python's threshold saves a fifteenth of the CPU of all tests, and this as much again."""
    gc.freeze()
    gc.set_threshold(200_000, 20, 20)
    gc.enable()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test that takes a ``shape`` runs in those that its marker names."""
    marker = metafunc.definition.get_closest_marker("covers")
    if marker is not None and "shape" in metafunc.fixturenames:
        metafunc.parametrize("shape", marker.args[1:])


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say at the end how many tests were skipped because there is no Redis, so that a green run cannot hide it."""
    skipped = [report for report in terminalreporter.stats.get("skipped", []) if "redis-server" in str(report.longrepr)]
    if skipped:
        terminalreporter.write_line(f"{len(skipped)} tests of runs in Redis were skipped: there is no redis-server")
