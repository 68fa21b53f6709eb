"""Runs on a real Ray cluster of two nodes: the API, pipelines, datasets. ``make test-cluster``."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import ray.data
from tests.cluster.harness import Account, Driver, RayNodes, model_server, prepare, ray_nodes, wait_for_notes
from tests.cluster.modules.cluster_notes import write_note
from tests.record.redis_servers import needs_redis, redis_server

from batch_agent import BatchAgent, Pipeline
from batch_agent.errors import RunRejected, SpecError
from batch_agent.ray import Ray, map_dataset
from batch_agent.record.reader import look

WANTED = "BATCH_AGENT_TEST_CLUSTER"
pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(not os.environ.get(WANTED), reason=f"make test-cluster sets {WANTED}"),
    pytest.mark.filterwarnings("ignore"),
]
TASK = "Work on {row}"


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayNodes]:
    with ray_nodes(2) as nodes:
        yield nodes


@pytest.fixture(scope="module")
def connected(cluster: RayNodes) -> Iterator[None]:
    ray.init(address=cluster.address, log_to_driver=False)
    yield
    ray.shutdown()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    with model_server(tmp_path, 0.02) as url:
        yield url


def rows(count: int) -> list[dict[str, str]]:
    return [{"row": f"row {row}"} for row in range(count)]


@pytest.mark.covers("resume", "Ray")
@pytest.mark.usefixtures("connected")
async def test_a_run_from_python_is_worked_on_by_actors_and_resumed_from_its_directory(
    server: str, tmp_path: Path
) -> None:
    where = Ray("auto", workers=2, worker_cpus=0.5)
    options = {"task": TASK, "tools": [write_note], "backend": server, "model": "m", "run_dir": tmp_path / "run"}
    first = await BatchAgent.run(inputs=rows(40), cluster=where, **options)  # type: ignore[arg-type]
    again = await BatchAgent.run(inputs=rows(50), cluster=where, resume=True, **options)  # type: ignore[arg-type]

    assert [result.output for result in again] == [f"row {row} is done" for row in range(50)]
    assert all(first) and [result.resumed for result in again] == [True] * 40 + [False] * 10
    assert len((tmp_path / "notes.log").read_text().split()) == 50
    assert len((tmp_path / "run" / "results.jsonl").read_text().splitlines()) == 50
    view = look(tmp_path / "run")
    assert (view.state, view.latest.ok) == ("complete", 50)
    asked = (tmp_path / "requests.log").read_text()
    alone = await BatchAgent.run(inputs=rows(50), resume=True, **options)  # type: ignore[arg-type]
    assert [result.output for result in alone] == [result.output for result in again]
    assert (tmp_path / "requests.log").read_text() == asked


@pytest.mark.usefixtures("connected")
async def test_a_run_without_a_directory_leaves_nothing_behind(server: str) -> None:
    results = await BatchAgent.run(
        task=TASK, inputs=rows(5), backend=server, model="m", tools=[write_note], cluster=Ray(worker_cpus=0.5)
    )
    assert all(results)


@needs_redis
@pytest.mark.usefixtures("connected")
async def test_a_pipeline_in_redis_is_worked_on_by_actors_and_resumed_without_them(server: str, tmp_path: Path) -> None:
    pipeline = Pipeline(rows(20)).map(name="work", task=TASK, tools=[write_note]).flat_map(lambda text: [text])
    pipeline = pipeline.map(name="again", task="Again: {input}", tools=[write_note])
    with redis_server(tmp_path / "redis") as redis:
        options = {"backend": server, "model": "m", "run_dir": f"{redis.url}/pipeline"}
        first = await pipeline.run(cluster=Ray("auto", workers=2, worker_cpus=0.5), **options)
        asked = (tmp_path / "requests.log").read_text()
        again = await pipeline.run(resume=True, **options)
    assert again.outputs == first.outputs and len(first.outputs) == 20
    assert (tmp_path / "requests.log").read_text() == asked


@pytest.mark.usefixtures("connected")
async def test_a_pipeline_without_redis_is_worked_on_by_actors(server: str, tmp_path: Path) -> None:
    pipeline = Pipeline(rows(10)).map(name="work", task=TASK, tools=[write_note])
    pipeline = pipeline.map(name="again", task="Again: {input}", tools=[write_note])
    where = Ray("auto", workers=2, worker_cpus=0.5)
    outcome = await pipeline.run(cluster=where, backend=server, model="m", run_dir=tmp_path / "run")
    assert len(outcome.outputs) == 10
    assert look(tmp_path / "run").state == "complete"


@pytest.mark.usefixtures("connected")
async def test_a_closure_is_refused_before_anything_is_sent(server: str, tmp_path: Path) -> None:
    def here(row: int) -> str:
        return "nothing"

    with pytest.raises(SpecError, match="another process can import"):
        await BatchAgent.run(task=TASK, inputs=rows(1), tools=[here], backend=server, model="m", cluster=Ray())
    assert not (tmp_path / "requests.log").read_bytes()


@pytest.mark.usefixtures("connected")
@pytest.mark.parametrize("workers", [2, "auto"])
async def test_a_run_whose_workers_all_fail_ends_with_the_reason(
    server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: Any
) -> None:
    name = f"only_at_the_driver_{workers}"
    (tmp_path / f"{name}.py").write_text(
        "import os\n"
        'assert os.environ.get("AT_THE_DRIVER"), "this machine has no licence"\n'
        "def tool(row: int) -> str:\n"
        '    """Return the row."""\n'
        "    return str(row)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("AT_THE_DRIVER", "1")
    tool = importlib.import_module(name).tool
    monkeypatch.delenv("AT_THE_DRIVER")
    where = Ray("auto", workers=workers, worker_cpus=0.5)
    with pytest.raises(RunRejected, match=f"every worker on Ray was lost: .*{name}") as error:
        await BatchAgent.run(task=TASK, inputs=rows(3), tools=[tool], backend=server, model="m", cluster=where)
    assert "\x1b" not in str(error.value)
    assert not (tmp_path / "requests.log").read_bytes()


@pytest.mark.usefixtures("connected")
def test_a_dataset_gets_its_results_as_columns_when_it_is_consumed(server: str, tmp_path: Path) -> None:
    dataset = ray.data.from_items([{**row, "turns": 7} for row in rows(30)])
    done = map_dataset(
        dataset, task=TASK, tools=[write_note], backend=server, model="m", run_dir=str(tmp_path / "run"), batch_size=8
    )
    assert not (tmp_path / "requests.log").read_bytes()
    found = done.take_all()
    assert sorted(row["output"] for row in found) == sorted(f"row {row} is done" for row in range(30))
    assert {(row["ok"], row["turns"], row["input.turns"]) for row in found} == {(True, 2, 7)}
    assert len((tmp_path / "notes.log").read_text().split()) == 30


def test_wrong_settings_of_a_cluster_say_what_is_wrong() -> None:
    with pytest.raises(SpecError, match="workers"):
        Ray(workers=0)
    with pytest.raises(SpecError, match="worker_cpus"):
        Ray(worker_cpus=-1)


def test_the_command_line_reaches_a_cluster_with_a_worker_on_each_node_and_stops_on_ctrl_c(
    cluster: RayNodes, server: str, tmp_path: Path
) -> None:
    prepare(tmp_path, server, 4000, 8)
    words = ("run", "spec.yaml", "--inputs", "rows.jsonl", "--output", "out.jsonl", "--run-dir", "run")
    driver = Driver(tmp_path, *words, "--ray", cluster.address, "--workers", "auto")
    wait_for_notes(tmp_path, 400, driver)
    assert len(set(cluster.workers().values())) == 2
    driver.interrupt()
    assert driver.wait() == 2
    account = Account.of(tmp_path, tmp_path / "out.jsonl")
    done = len(account.delivered)
    assert 100 <= done < 4000 and account.asked_again == 0 and len(account.written) == done


def test_a_cluster_that_is_not_there_is_named(server: str, tmp_path: Path) -> None:
    prepare(tmp_path, server, 1, 8)
    driver = Driver(tmp_path, "run", "spec.yaml", "--inputs", "rows.jsonl", "--ray", "127.0.0.1:1")
    assert driver.wait() == 4
    assert "127.0.0.1:1 is unreachable" in (tmp_path / "driver.log").read_text()
