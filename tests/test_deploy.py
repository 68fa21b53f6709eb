"""The scripts in deploy/: what they would start. Whether a server starts with it is said beside each of them."""

from __future__ import annotations

import argparse
import configparser
import json
import math
import os
import shlex
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import yaml

from batch_agent.cli.main import add_arguments, build_parser

DEPLOY = Path(__file__).parents[1] / "deploy"
BYTES = 64 * 2**30


def started(tmp_path: Path, engine: str, variable: str, **environ: str) -> list[str]:
    """The arguments that the script gives to the engine's command."""
    command = tmp_path / "command"
    command.write_text(f"#!{sys.executable}\nimport json, sys\nprint(json.dumps(sys.argv[1:]))\n")
    command.chmod(0o755)
    script = [str(DEPLOY / engine / "serve.sh"), "a/model", "--max-model-len", "1024"]
    variables = os.environ | {variable: str(command)} | environ
    run = subprocess.run(script, env=variables, capture_output=True, text=True, timeout=60, check=True)
    arguments: list[str] = json.loads(run.stdout)
    return arguments


def connector(arguments: list[str]) -> Any:
    return json.loads(arguments[arguments.index("--kv-transfer-config") + 1])


def test_vllm_is_started_with_what_agents_need(tmp_path: Path) -> None:
    arguments = started(tmp_path, "vllm", "VLLM")
    assert arguments[:2] == ["serve", "a/model"]
    assert {"--enable-prompt-tokens-details", "--tool-call-parser", "--max-model-len"} <= set(arguments)
    assert "--kv-transfer-config" not in arguments


def test_vllm_with_pins_offload_or_both(tmp_path: Path) -> None:
    pins = connector(started(tmp_path, "vllm", "VLLM", PINS="1"))
    assert (pins["kv_connector"], pins["kv_connector_module_path"]) == ("PinConnector", "batch_agent.vllm_pin")
    offload = connector(started(tmp_path, "vllm", "VLLM", OFFLOAD_GIB="64"))
    assert offload["kv_connector_extra_config"] == {"cpu_bytes_to_use": BYTES, "offload_prompt_only": False}
    both = connector(started(tmp_path, "vllm", "VLLM", PINS="1", OFFLOAD_GIB="64"))
    assert both["kv_connector_extra_config"]["connectors"] == [pins, offload]


def test_sglang_is_started_with_what_agents_need(tmp_path: Path) -> None:
    arguments = started(tmp_path, "sglang", "SGLANG", OFFLOAD_RATIO="2", SHARED="1", TOOL_PARSER="")
    assert {"--enable-cache-report", "--enable-priority-scheduling", "--enable-hierarchical-cache"} <= set(arguments)
    assert arguments[arguments.index("--radix-eviction-policy") + 1] == "priority"
    assert "--tool-call-parser" not in arguments


def test_vllm_with_lmcache_has_a_store_and_ends_with_it(tmp_path: Path) -> None:
    said, store, engine = tmp_path / "said", tmp_path / "store", tmp_path / "engine"
    store.write_text(f"#!/bin/sh\nprintf '%s\\n' \"$@\" > {said}.part; mv {said}.part {said}\nexec sleep 600\n")
    engine.write_text(f'#!/bin/sh\nuntil [ -e {said} ]; do sleep 0.01; done\nexec {tmp_path}/command "$@"\n')
    for command in (store, engine):
        command.chmod(0o755)
    shared = {"type": "resp", "host": "a store", "port": 6379}
    options = {"LMCACHE": str(store), "LMCACHE_PORT": "5777", "LMCACHE_L2": json.dumps(shared)}
    arguments = started(tmp_path, "lmcache", "VLLM", VLLM=str(engine), **options)
    assert {"a/model", "--enable-prompt-tokens-details", "--max-model-len"} <= set(arguments)
    assert connector(arguments)["kv_connector"] == "LMCacheMPConnector"
    assert connector(arguments)["kv_connector_extra_config"]["lmcache.mp.port"] == 5777
    given = said.read_text().splitlines()
    assert given[given.index("--port") + 1] == "5777" and json.loads(given[given.index("--l2-adapter") + 1]) == shared


def test_dynamo_ends_with_all_that_it_started_when_one_of_them_ends(tmp_path: Path) -> None:
    frontend, worker = tmp_path / "frontend", tmp_path / "worker"
    frontend.write_text("#!/bin/sh\nexec sleep 600\n")
    worker.write_text('#!/bin/sh\necho "$@"\n')
    for command in (frontend, worker):
        command.chmod(0o755)
    variables = os.environ | {"FRONTEND": str(frontend), "WORKER": str(worker), "DYN_FILE_KV": str(tmp_path)}
    run = subprocess.run(
        [str(DEPLOY / "dynamo" / "serve.sh"), "a/model"], env=variables, capture_output=True, text=True, timeout=60
    )
    assert run.stdout == "--model-path a/model\n"


@pytest.mark.parametrize("engine", ["vllm", "sglang", "dynamo", "lmcache"])
def test_each_recipe_says_what_was_run_and_what_was_not(engine: str) -> None:
    assert "## What was run" in (DEPLOY / engine / "README.md").read_text()


def test_serve_on_kubernetes_is_started_with_arguments_that_it_has() -> None:
    documents = list(yaml.safe_load_all((DEPLOY / "serve" / "kubernetes.yaml").read_text()))
    deployment = next(each for each in documents if each["kind"] == "Deployment")
    pod = deployment["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    parser, parsers = build_parser()
    add_arguments("serve", parsers["serve"])
    options = parser.parse_args(container["args"])
    assert options.backend == "vllm://vllm:8000" and options.host == "0.0.0.0" and not options.shared
    probes = {kind: container[f"{kind}Probe"]["httpGet"]["path"] for kind in ("readiness", "liveness", "startup")}
    assert probes == {"readiness": "/health", "liveness": "/health/live", "startup": "/health/live"}
    assert pod["terminationGracePeriodSeconds"] > options.drain
    claims = {each["persistentVolumeClaim"]["claimName"] for each in pod["volumes"]}
    assert claims == {each["metadata"]["name"] for each in documents if each["kind"] == "PersistentVolumeClaim"}
    assert container["volumeMounts"][0]["mountPath"] in options.data
    service = next(each for each in documents if each["kind"] == "Service")
    assert service["spec"]["ports"][0]["port"] == options.port == container["ports"][0]["containerPort"]


def serve_options(arguments: list[str]) -> argparse.Namespace:
    parser, parsers = build_parser()
    add_arguments("serve", parsers["serve"])
    return parser.parse_args(arguments)


def test_serve_as_a_service_of_systemd_is_started_with_arguments_that_it_has_and_has_time_to_stop() -> None:
    unit = configparser.RawConfigParser(strict=False)
    unit.optionxform = str  # type: ignore[assignment, method-assign]
    unit.read(DEPLOY / "serve" / "batch-agent-serve.service")
    service = unit["Service"]
    command, *arguments = shlex.split(service["ExecStart"])
    options = serve_options(arguments)
    assert command.endswith("/batch-agent") and options.log == "json"
    assert options.data.startswith(f"/var/lib/{service['StateDirectory']}/")
    assert float(service["TimeoutStopSec"]) > options.drain and service["Restart"] == "always"


def test_serve_in_compose_has_redis_that_keeps_what_it_has_and_arguments_that_it_has() -> None:
    services = yaml.safe_load((DEPLOY / "serve" / "compose.yaml").read_text())["services"]
    options = serve_options(services["serve"]["command"])
    assert options.store == "redis://redis:6379/0" and options.host == "0.0.0.0"
    redis = services["redis"]["command"]
    assert redis[redis.index("--appendonly") + 1] == "yes" and services["redis"]["volumes"]
    assert {name: each["condition"] for name, each in services["serve"]["depends_on"].items()} == {
        "redis": "service_healthy",
        "first-tenant": "service_completed_successfully",
    }
    assert float(services["serve"]["stop_grace_period"].removesuffix("s")) > options.drain
    assert "/health/live" in services["serve"]["healthcheck"]["test"][-1]
    parser, parsers = build_parser()
    add_arguments("work", parsers["work"])
    assert parser.parse_args(services["worker"]["command"]).wait == math.inf
    assert options.data in services["first-tenant"]["command"][0]


def test_a_night_of_slurm_serves_until_its_time_limit(tmp_path: Path) -> None:
    for name, content in {
        "batch-agent": f'exec {sys.executable} -m batch_agent "$@"',
        "vllm": f'echo "$@" > {tmp_path}/engine; exec sleep 600',
    }.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{content}\n")
        (tmp_path / name).chmod(0o755)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    data = tmp_path / "data"
    variables = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "DATA": str(data), "PORT": str(port)}
    command = ["bash", str(DEPLOY / "serve" / "night.sbatch"), "a/model"]
    with subprocess.Popen(command, env=os.environ | variables, stdout=subprocess.PIPE, text=True) as job:
        try:
            assert job.stdout is not None
            assert job.stdout.readline().strip() == f"http://0.0.0.0:{port}"
            assert (data / "address").read_text().strip() == f"http://{socket.gethostname()}:{port}"
            assert "serve a/model" in (tmp_path / "engine").read_text()
            key = (data / "team-key").read_text().strip()
            headers = {"Authorization": f"Bearer {key}"}
            asked = urllib.request.Request(f"http://127.0.0.1:{port}/v1/batches", headers=headers)
            with urllib.request.urlopen(asked, timeout=60) as answer:
                assert json.loads(answer.read())["data"] == []
        finally:
            job.terminate()
    assert job.returncode == 0
    assert not (data / "address").exists()
