from __future__ import annotations

from pathlib import Path

import pytest

from batch_agent.backends.openai.chat import OpenAIBackend
from batch_agent.backends.registry import open_backend
from batch_agent.errors import SpecError
from batch_agent.fleet.hostfile import AgentEndpoint, parse_hostfile, parse_hosts


def one(line: str) -> AgentEndpoint:
    (endpoint,) = parse_hosts(line, "hosts.txt")
    return endpoint


@pytest.mark.parametrize(
    ("line", "url"),
    [
        ("gpu-1", "http://gpu-1:8000"),
        ("gpu-1\t8001", "http://gpu-1:8001"),
        ("gpu-1   8001", "http://gpu-1:8001"),
        ("gpu-1:8001", "http://gpu-1:8001"),
        ("10.0.0.1:8001", "http://10.0.0.1:8001"),
        ("[fd00::1]:8001", "http://[fd00::1]:8001"),
        ("[fd00::1]", "http://[fd00::1]:8000"),
        ("fd00::1\t8001", "http://[fd00::1]:8001"),
        ("https://models.example.org/team/", "https://models.example.org/team"),
        ("https://models.example.org:8443", "https://models.example.org:8443"),
        ("http://gpu-1", "http://gpu-1"),
        ("vllm://gpu-1", "http://gpu-1:8000"),
        ("sglang://gpu-1", "http://gpu-1:30000"),
        ("sglang://gpu-1 30001", "http://gpu-1:30001"),
        ("  gpu-1:8001  # the old one", "http://gpu-1:8001"),
    ],
)
def test_an_address_is_read_in_every_form_that_people_write(line: str, url: str) -> None:
    assert one(line).url == url


def test_tags_are_read_with_tabs_and_with_spaces() -> None:
    assert one("gpu-1\t8000\tnode=r1\trole=worker") == AgentEndpoint("gpu-1", 8000, {"node": "r1", "role": "worker"})
    assert one("gpu-1 role=worker note=a=b").tags == {"role": "worker", "note": "a=b"}


def test_a_scheme_is_kept() -> None:
    assert [one(line).scheme for line in ("gpu-1", "vllm://gpu-1", "https://gpu-1/v1")] == ["", "vllm", "https"]


def test_endpoints_can_be_keys_although_they_have_tags() -> None:
    assert len({AgentEndpoint("a", 1, {"role": "x"}), AgentEndpoint("a", 1, {"role": "x"})}) == 1


def test_a_file_is_read_in_its_order_without_blanks_and_comments(tmp_path: Path) -> None:
    hosts = tmp_path / "hosts.txt"
    hosts.write_text("\ufeff# all of them\n\ngpu-2\n  # not this: gpu-9\ngpu-1\t8001\n", encoding="utf-8")
    assert parse_hostfile(hosts) == [AgentEndpoint("gpu-2", 8000), AgentEndpoint("gpu-1", 8001)]
    assert parse_hostfile(str(hosts)) == parse_hostfile(hosts)


def test_a_node_file_lists_a_host_once_per_core_and_it_is_one_endpoint() -> None:
    assert [end.host for end in parse_hosts("n1\nn1\nn2\nn1\n", "nodes")] == ["n1", "n2"]


def test_a_line_with_a_port_or_a_tag_is_an_endpoint_of_its_own() -> None:
    text = "n1 8000 role=worker\nn1 8000 role=critic\nn1:8000\nn1:8000\n"
    assert len(parse_hosts(text, "hosts.txt")) == 4


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("gpu-1:http", "neither a port nor a tag"),
        ("gpu-1 0", "neither a port"),
        ("gpu-1 65536", "neither a port"),
        ("gpu-1 8000 worker", "not a tag"),
        ("gpu-1 8000 =worker", "not a tag"),
        ("gpu-1 role=a role=b", "given twice"),
        ("gpu-1:8000 8001", "two ports"),
        ("fd00::1", "ambiguous"),
        ("[fd00::1", "not an address"),
        ("[gpu-1]:8000", "not an IPv6"),
        ("nid[001-004]", "scontrol show hostnames"),
        ("gpu/1", "not a host name"),
        ("ftp://gpu-1", "no scheme 'ftp'"),
        ("https://user:secret@gpu-1", "not contain logins"),
        ("user:secret@gpu-1:8000", "not contain logins"),
        ("https://gpu-1/v1?tls=1", "nothing may follow the path"),
        ("vllm://", "not a host name"),
    ],
)
def test_a_line_that_cannot_be_read_is_an_error_with_its_number(line: str, why: str) -> None:
    with pytest.raises(SpecError, match="line 3 of the hostfile") as raised:
        parse_hosts(f"# hosts\ngpu-0\n{line}\n", "hosts.txt")
    assert why in str(raised.value)
    assert "secret" not in str(raised.value)


def test_a_file_that_is_not_there_or_not_text_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"missing\.txt"):
        parse_hostfile(tmp_path / "missing.txt")
    (tmp_path / "hosts.bin").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(SpecError, match="not text"):
        parse_hostfile(tmp_path / "hosts.bin")


def test_a_line_is_read_as_what_it_was_written_from() -> None:
    text = (
        "a\nb\t8001\trole=worker\tnode=r1\n[fd00::1]:8000 role=x\nhttps://h.example/team\nsglang://g\nhttp://i:81 a=b"
    )
    hosts = parse_hosts(text, "test")
    assert parse_hosts("\n".join(host.line for host in hosts), "test") == hosts
    assert [host.line for host in hosts[:2]] == ["a\t8000", "b\t8001\trole=worker\tnode=r1"]


def test_the_api_begins_where_the_backends_say_it_does() -> None:
    for line in (
        "a",
        "a:8001",
        "sglang://g",
        "vllm://a/deep",
        "https://h.example",
        "https://h.example/team",
        "http://h/v1",
    ):
        [host] = parse_hosts(line, "test")
        backend, _ = open_backend(host.address, model=None, api_key=None, environ={})
        assert isinstance(backend, OpenAIBackend)
        assert host.api == backend.client.base_url
