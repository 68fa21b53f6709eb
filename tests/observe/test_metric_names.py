"""One list of names: what the code counts, what docs/metrics.md explains, what the dashboard and the alerts use."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import get_args

import pytest
from tests.observe.exposition_rules import promtool

import batch_agent
from batch_agent.events import Event

ROOT = Path(__file__).parents[2]
NAME = re.compile(r"batch_agent_[a-z_]+[a-z]")
COUNTED = re.compile(r"""(?:Counter|Gauge|Histogram)\(\s*"(batch_agent_[a-z_]+)\"""")


def existing() -> set[str]:
    sources = Path(batch_agent.__file__).parent.rglob("*.py")
    return {name for path in sources for name in COUNTED.findall(path.read_text())}


def named_in(text: str) -> set[str]:
    return {re.sub("_(bucket|count|sum)$", "", name) for name in NAME.findall(text)}


def test_every_number_is_explained() -> None:
    assert named_in((ROOT / "docs" / "metrics.md").read_text()) == existing()


@pytest.mark.parametrize("file", ["deploy/grafana/dashboard.json", "deploy/prometheus/alerts.yml"])
def test_what_the_dashboard_and_the_alerts_use_exists(file: str) -> None:
    used = named_in((ROOT / file).read_text())
    assert used and used <= existing()


@pytest.mark.parametrize("file", ["dashboard.json", "serve.json"])
def test_every_panel_of_the_dashboard_asks_something(file: str) -> None:
    dashboard = json.loads((ROOT / "deploy/grafana" / file).read_text())
    assert all(target["expr"] for panel in dashboard["panels"] for target in panel["targets"])
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])


@pytest.mark.parametrize("file", ["alerts.yml", "serve-alerts.yml"])
def test_promtool_takes_the_alerts(file: str) -> None:
    assert promtool("check", "rules", str(ROOT / "deploy/prometheus" / file)) in ("", None)


def test_every_event_and_each_of_its_fields_is_on_the_page_of_events() -> None:
    lines = (ROOT / "docs" / "events.md").read_text().splitlines()
    rows = {line.split("`")[1]: line for line in lines if line.startswith("| `")}
    common = {"at", "run", "index"}
    assert common <= rows.keys()
    for kind in get_args(Event):
        fields = {field.name for field in dataclasses.fields(kind)} - common
        assert {name for name in fields if f"`{name}`" not in rows[kind.__name__]} == set()
