"""``batch-agent ticks serve``: serves the agents of a spec file over HTTP; they decide at each tick."""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from batch_agent.backends.address import check_known
from batch_agent.cli.interrupts import serve
from batch_agent.cli.output.streams import say
from batch_agent.cli.spec.numbers import add_address, add_key, key_of
from batch_agent.cli.spec.specfile import SpecFile, read_mapping
from batch_agent.errors import SpecError
from batch_agent.ticks import Action, Agent, AgentRuntime
from batch_agent.ticks.server import TickServer

RUNTIME_OPTIONS = tuple(inspect.signature(AgentRuntime).parameters)
AGENT_OPTIONS = tuple(name for name in inspect.signature(Agent).parameters if name != "memory")  # a Python object
SHARED_OPTIONS = ("tools", "goals", "fallback")  # defaults of all agents


def add_ticks_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    server = actions.add_parser(
        "serve", help="serve agents over HTTP", description="Serve agents over HTTP: /tick, /observe, /health."
    )
    server.add_argument("--agents", type=Path, required=True, metavar="FILE", help="the agents, in YAML, TOML or JSON")
    add_address(server, 5000)
    add_key(server)
    server.add_argument("--backend", metavar="URL", help="overrides the backend of the file")
    server.add_argument("--model", help="overrides the model of the file")
    server.add_argument("--deadline", type=float, metavar="SECONDS", help="maximum time of a tick; overrides the file")
    server.add_argument("--trace", type=Path, metavar="FILE", help="append each decision to this file, as JSON lines")
    server.add_argument("--replay", type=Path, metavar="FILE", help="take decisions from a trace instead of a model")


def ticks_command(options: argparse.Namespace) -> int:
    given = {name: getattr(options, name) for name in ("backend", "model", "deadline", "trace", "replay")}
    runtime = runtime_of(
        read_mapping(options.agents), {name: value for name, value in given.items() if value is not None}
    )
    key, words = key_of(options)
    count = len(runtime.agents)
    serving = TickServer(runtime, key).serve(
        options.host, options.port, lambda url: say(f"{count} agents at {url}{words}; Ctrl-C stops them")
    )
    return serve(serving)


def runtime_of(file: SpecFile, overrides: Mapping[str, Any]) -> AgentRuntime:
    """Return the runtime that a spec file describes, with its agents. A SpecError names the file."""
    options = {**file.options}
    with file.named():
        listed = options.pop("agents", None)
        check_known(options, (*RUNTIME_OPTIONS, *SHARED_OPTIONS), "there is no option")
        shared = {name: options.pop(name) for name in SHARED_OPTIONS if name in options}
        for name in ("trace", "replay"):
            if name in options:
                options[name] = file.path.parent / str(options[name])
        runtime = AgentRuntime(**{**file.follow(options), **overrides})
        for given in _agents(listed):
            agent = _agent(file, {**shared, **given})
            if agent.agent_id in runtime.agents:
                raise SpecError(f"agents: {agent.agent_id!r} is given twice")
            runtime.register_agent(agent)
    return runtime


def _agents(listed: object) -> list[dict[str, Any]]:
    """Return the options of each agent, from a list of ids or mappings, or from a mapping by id."""
    if isinstance(listed, Mapping):
        listed = [{"agent_id": agent_id, **(agent or {})} for agent_id, agent in listed.items()]
    if not isinstance(listed, list) or not listed:
        raise SpecError("agents: must be a list of ids, or of mappings with an agent_id each")
    agents = []
    for place, agent in enumerate(listed):
        agent = {"agent_id": agent} if isinstance(agent, str) else agent
        if not isinstance(agent, Mapping):
            raise SpecError(f"agents[{place}]: must be an id, or a mapping with an agent_id")
        known = {("agent_id" if key == "id" else str(key)): value for key, value in agent.items()}
        check_known(known, AGENT_OPTIONS, f"agents[{place}] has no")
        if "agent_id" not in known:
            raise SpecError(f"agents[{place}]: has no agent_id")
        agents.append(known)
    return agents


def _agent(file: SpecFile, given: dict[str, Any]) -> Agent:
    if isinstance(goals := given.get("goals"), str):
        given["goals"] = [goals]
    if "tools" in given:
        if not isinstance(tools := given["tools"], list):
            raise SpecError("tools: must be a list")
        given["tools"] = [file.imported(tool) if isinstance(tool, str) and ":" in tool else tool for tool in tools]
    for name in ("fallback", "priority"):
        if isinstance(given.get(name), str) and ":" in given[name]:
            given[name] = file.imported(given[name])
    given["fallback"] = _fallback(given.get("fallback"))
    return Agent(
        **file.follow({key: value for key, value in given.items() if key != "tools"}), tools=given.get("tools")
    )


def _fallback(value: object) -> Any:
    """Return the fallback action, from the name of a tool or from an action in the format of answers."""
    if isinstance(value, str):
        return Action(value)
    if isinstance(value, Mapping):
        check_known(map(str, value), ("tool", "params", "reasoning"), "fallback has no")
        return Action(str(value.get("tool")), dict(value.get("params") or {}), value.get("reasoning"))
    return value
