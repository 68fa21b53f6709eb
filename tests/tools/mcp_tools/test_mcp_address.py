"""Addresses of MCP servers and ``mcpServers`` files."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from tests.tools.mcp_tools.test_bad_mcp_servers import BAD_SERVER

from batch_agent.errors import SpecError
from batch_agent.tools import Tool
from batch_agent.tools.mcp.address import McpServer, read_servers, server_of


def test_an_address_is_a_command_or_a_url() -> None:
    assert server_of("stdio:npx -y 'a b'").command == ("npx", "-y", "a b")
    assert server_of(["npx", "-y"]).command == ("npx", "-y")
    assert server_of("https://u:p@host/mcp?key=k").label == "https://host/mcp"
    assert "secret" not in repr(server_of("http://host/mcp", headers={"Authorization": "secret"}))


@pytest.mark.parametrize(
    ("server", "options", "words"),
    [
        ("npx -y server", {}, 'is not an MCP server: give "stdio:COMMAND"'),
        ("stdio:", {}, "names no command"),
        ("stdio:a 'b", {}, "cannot be split"),
        ([], {}, "a command and its arguments"),
        ("stdio:a", {"headers": {"A": "b"}}, "headers are for MCP servers with a URL"),
        ("http://a", {"env": {"A": "b"}}, "env is for MCP servers that are a command"),
        ("http://a", {"headers": {"A": 1}}, "headers: 'A' must be text"),
        ("http://a", {"connect_timeout": 0}, "connect_timeout is 0"),
    ],
)
def test_a_wrong_address_is_refused_in_words(server: object, options: dict[str, object], words: str) -> None:
    with pytest.raises(SpecError, match=words):
        server_of(server, **options)  # type: ignore[arg-type]


def test_a_file_names_servers_and_takes_variables_from_the_environment(tmp_path: Path) -> None:
    path = tmp_path / "mcp.json"
    servers = {
        "here": {"command": "npx", "args": ["-y", "${NAME:-default}"], "env": {"TOKEN": "${TOKEN}"}},
        "there": {"type": "http", "url": "https://${HOST}/mcp", "headers": {"Authorization": "Bearer ${TOKEN}"}},
        "off": {"command": "x", "disabled": True},
    }
    path.write_text(json.dumps({"mcpServers": servers}))
    assert read_servers(path, env={"TOKEN": "t", "HOST": "example.org"}) == {
        "here": McpServer(command=("npx", "-y", "default"), environment=(("TOKEN", "t"),)),
        "there": McpServer(url="https://example.org/mcp", headers=(("Authorization", "Bearer t"),)),
    }
    with pytest.raises(SpecError, match="server 'here': the environment variable TOKEN is not set"):
        read_servers(path, env={})
    for content, words in [
        ("{", "is not JSON"),
        ("[]", 'has no "mcpServers"'),
        ('{"mcpServers": {"a": {}}}', "server 'a': needs either command or url"),
        ('{"mcpServers": {"a": {"url": "http://x", "type": "sse"}}}', "type 'sse' is not supported"),
        ('{"mcpServers": {"a": {"command": "x", "args": "y"}}}', "args must be a list"),
    ]:
        path.write_text(content)
        with pytest.raises(SpecError, match=words):
            read_servers(path, env={})


def test_servers_of_a_file_with_equal_tools_need_a_prefix(tmp_path: Path) -> None:
    path = tmp_path / "mcp.json"
    server = {"command": sys.executable, "args": ["-I", BAD_SERVER, "fine"]}
    path.write_text(json.dumps({"mcpServers": {"a": server, "b.c": server}}))
    with pytest.raises(SpecError, match=r"a and b.c both have a tool 'look'; give prefix=\"{server}_\""):
        Tool.mcp_file(path)
    assert [tool.name for tool in Tool.mcp_file(path, prefix="{server}_")] == ["a_look", "b_c_look"]
    assert [tool.name for tool in Tool.mcp_file(path, servers=["a"])] == ["look"]
    with pytest.raises(SpecError, match="has no server 'x'; it has a, b"):
        Tool.mcp_file(path, servers=["x"])
