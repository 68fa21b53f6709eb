"""What a worker takes from a record that others can write: only what its own side allowed."""

from __future__ import annotations

import asyncio
import json
import shlex
import socket
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import pytest
from tests.record.redis_servers import needs_redis

from batch_agent import BatchAgent, Pipeline, SpecError
from batch_agent.agent.fingerprint import fingerprint_of
from batch_agent.agent.prepare import prepare
from batch_agent.cli.commands.work import named_things
from batch_agent.errors import InputError, StoreError
from batch_agent.record.address import StoreAddress
from batch_agent.record.redis.connection import connect
from batch_agent.record.redis.store import RedisRunStore
from batch_agent.run.joined_worker import open_store, prepare_recorded, prepare_worker
from batch_agent.run.joined_worker import work as join
from batch_agent.run.recording import facts_for_workers, versions
from batch_agent.run.spec_json import FEEDERS, read_spec
from batch_agent.run.trust import DIRECTORIES, NAMES, PLACES, Trust, fingerprint_of_things, sign, sign_file, things_of
from batch_agent.spec import BatchSpec
from batch_agent.testing import Say, ScriptedServer

SECRET = {"BATCH_AGENT_CLUSTER_SECRET": "s3"}
SPEC = {
    "backend": ["vllm://gpu-1:8000", {"url": "openai://api.example.org/v1"}],
    "tools": ["read_file", "mcp:stdio:npx server", "reviews:search"],
    "output_schema": "reviews:Review",
    "compaction": "auto",
    "runtime": {"name": "codex", "command": ["codex"]},
    "cache": "/var/cache",
    "task": "Do {row}",
}
FACTS: dict[str, Any] = {
    "spec": SPEC,
    "specs": {"second": {"worker": "reviews:judge", "vote": {"mood": "reviews:pick", "tone": "majority"}}},
    "row_schema": "reviews:Row",
}


@pytest.fixture(autouse=True)
def secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BATCH_AGENT_CLUSTER_SECRET", raising=False)


def trust(*allow: str, environ: Mapping[str, str] | None = None, **others: Any) -> Trust:
    return Trust(allow, environ=environ or {}, **others)


def test_everything_that_a_record_can_name_is_known() -> None:
    assert things_of(FACTS) == [
        "cache=/var/cache",
        "mcp:stdio:npx server",
        "openai://api.example.org/v1",
        "read_file",
        "reviews:Review",
        "reviews:Row",
        "reviews:judge",
        "reviews:pick",
        "reviews:search",
        'runtime:{"name":"codex","command":["codex"]}',
        "vllm://gpu-1:8000",
    ]


def test_an_option_that_could_name_something_is_decided_on() -> None:
    texts = {"task", "id_column", "images", "document_column", "system_prompt", "model", "affinity", "stop"}
    values = {"compaction_model", "extra_body", "prices", "tool_choice", "retry_failed"}
    others = {"tools", "runtime", "vote", "cascade", "escalate"}
    known = {*FEEDERS, *PLACES, *NAMES, *DIRECTORIES, *others, *texts, *values}
    numbers = {int, float, bool, type(None)}
    for name, field in BatchSpec.model_fields.items():
        assert name in known or kinds(field.annotation) <= numbers, name


def kinds(annotation: Any) -> set[Any]:
    """The types that a value may have; a Literal has none, because its values are known."""
    if get_origin(annotation) is Literal:
        return set()
    inside = get_args(annotation)[:1] if get_origin(annotation) is Annotated else get_args(annotation)
    return {kind for each in inside for kind in kinds(each)} if inside else {annotation}


@pytest.mark.parametrize(
    ("pattern", "thing", "fits"),
    [
        ("vllm://gpu-1:8000", "vllm://gpu-1:8000", True),
        ("vllm://gpu-*", "vllm://gpu-2:8000", True),
        ("vllm://*.internal:8000", "vllm://a.internal:8000", True),
        ("vllm://gpu-*", "vllm://gpu-1:80@evil.org", False),
        ("vllm://gpu-*", "vllm://gpu-1/?path", False),
        ("vllm://gpu-*", "openai://gpu-1", False),
        ("vllm://*.internal", "vllm://evil.org/.internal", False),
        ("reviews:*", "reviews:search", True),
        ("reviews:*", "os:system", False),
        ("reviews:*", "xreviews:search", False),
        ("mcp:stdio:npx server", "mcp:stdio:npx server; rm", False),
        ("read_file", "python_eval", False),
    ],
)
def test_a_pattern_allows_what_it_says_and_nothing_behind_it(pattern: str, thing: str, fits: bool) -> None:
    facts = {"spec": {"tools": [thing]}}
    if fits:
        trust(pattern).check(facts)
        trust(environ={"BATCH_AGENT_ALLOW": f"other {pattern}"}).check(facts)
    else:
        with pytest.raises(SpecError, match="--allow '"):
            trust(pattern).check(facts)


def test_a_refusal_names_the_things_and_the_flags() -> None:
    with pytest.raises(SpecError) as refused:
        trust("reviews:*", "read_file", "vllm://*").check(FACTS)
    said = str(refused.value)
    assert "mcp:stdio:npx server" in said and "openai://api.example.org/v1" in said and "reviews:judge" not in said
    assert "--allow 'cache=/var/cache'" in said and "--trust" in said and "BATCH_AGENT_CLUSTER_SECRET" in said


def test_a_fingerprint_allows_what_the_feeder_named_in_every_stage_and_nothing_else() -> None:
    worker = trust(fingerprint=fingerprint_of_things(FACTS))
    worker.check(FACTS)
    worker.check({"spec": {"worker": "reviews:judge"}})  # a stage
    with pytest.raises(SpecError, match="os:system"):
        worker.check({"spec": {"worker": "os:system"}})
    changed = {**FACTS, "spec": {**SPEC, "tools": ["mcp:stdio:rm"]}}
    with pytest.raises(SpecError, match=r"not the one with the fingerprint .* mcp:stdio:rm"):
        trust(fingerprint=fingerprint_of_things(FACTS)).check(changed)
    assert fingerprint_of_things({**FACTS, "spec": {**SPEC, "task": "Other"}}) == fingerprint_of_things(FACTS)


def test_a_signed_record_needs_no_flags_and_an_unsigned_or_changed_one_is_refused() -> None:
    signed = sign({**FACTS}, SECRET)
    trust(environ=SECRET).check(json.loads(json.dumps(signed)))
    for wrong, why in (
        (FACTS, "is not signed"),
        (sign({**FACTS}, {"BATCH_AGENT_CLUSTER_SECRET": "other"}), "signature .* is wrong"),
        ({**signed, "spec": {**SPEC, "task": "Other"}}, "signature .* is wrong"),
        ({**signed, "specs": {}}, "signature .* is wrong"),
    ):
        with pytest.raises(SpecError, match=why):
            trust("*", environ=SECRET, fingerprint=fingerprint_of_things(wrong)).check(wrong)


@pytest.mark.parametrize("secret", ["s3", "\udcff", "ü"])
def test_any_text_and_any_secret_can_be_signed(secret: str) -> None:
    environ = {"BATCH_AGENT_CLUSTER_SECRET": secret}  # bytes that are not UTF-8 are lone surrogates in the environment
    for spec in ({**SPEC, "task": "half \ud83d of a pair"}, {**SPEC, "extra_body": {"seed": 2**80}}):
        facts: dict[str, Any] = json.loads(json.dumps(sign({"spec": spec}, environ)))
        trust(environ=environ).check(facts)
        for signature in ("é", "\ud800", ""):
            with pytest.raises(SpecError, match="the signature of the record of this run is wrong"):
                trust(environ=environ).check({**facts, "signature": signature})


def test_a_hostfile_of_the_record_names_only_servers_that_are_allowed() -> None:
    text = "gpu-1\ngpu-2 8001\n"
    files = {"plain": text, "signed": sign_file("signed", text, SECRET)}
    read = trust("vllm://gpu-*").file(files.get)
    assert read("plain") == text and read("none") is None
    with pytest.raises(SpecError, match=r"'plain' in the record names .* vllm://gpu-2:8001"):
        trust("vllm://gpu-1:8000").file(files.get)("plain")
    worker = trust(fingerprint=fingerprint_of_things({"hosts": ["vllm://gpu-1:8000", "vllm://gpu-2:8001"]}))
    worker.check({"hosts": ["vllm://gpu-1:8000", "vllm://gpu-2:8001"]})
    assert worker.file(files.get)("plain") == text
    files["plain"] = text + "evil.org\n"
    with pytest.raises(SpecError, match=r"vllm://evil.org:8000"):
        worker.file(files.get)("plain")
    assert trust(environ=SECRET).file(files.get)("signed") == text
    with pytest.raises(SpecError, match="is not signed"):
        trust(environ=SECRET).file(files.get)("plain")


def test_options_that_only_a_feeder_has_are_refused_in_a_record() -> None:
    for name in sorted(FEEDERS - {"no_hoist"}):
        with pytest.raises(SpecError, match=f"the record sets {name}, and only a feeder"):
            read_spec({"task": "Do {row}", name: "/tmp/written"}, [], None)


def test_a_cascade_in_a_record_is_a_list_whose_entries_were_checked() -> None:
    entries = [{"backend": "vllm://evil:1"}, {"backend": "vllm://gpu:1", "tools": ["mcp:stdio:rm"]}, "people"]
    rule = 'output.mood == "module:function"'
    record = {"task": "Do {row}", "cascade": entries, "escalate": rule}
    assert things_of({"spec": record}) == ["mcp:stdio:rm", "vllm://evil:1", "vllm://gpu:1"]
    assert read_spec(record, [], None).escalate == rule
    for other in (json.dumps(entries), "/tmp/entries.json"):
        with pytest.raises(SpecError, match="a cascade that is no list of entries"):
            read_spec({**record, "cascade": other}, [], None)


def test_a_worker_reads_only_files_below_a_directory_that_is_allowed(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"--allow 'image_root=\.'"):
        trust().check({"spec": {"images": ["picture"]}})
    inside = tmp_path / "rows"
    inside.mkdir()
    (tmp_path / "secret.txt").write_text("secret")
    (inside / "link.txt").symlink_to(tmp_path / "secret.txt")
    (inside / "text.txt").write_text("fine")
    spec = {"task": "Sum up {text}", "document_column": "file", "backend": "vllm://gpu", "model": "m"}
    options = {**spec, "image_root": str(inside)}
    for each in (trust(), trust(environ=SECRET)):
        plan = prepare_recorded(options, None, each).plan
        assert "fine" in plan.job(0, {"file": "text.txt"}).prompt
        for outside in ("../secret.txt", "link.txt", str(tmp_path / "secret.txt")):
            with pytest.raises(InputError, match="outside of"):
                plan.job(0, {"file": outside})


def test_a_record_without_a_backend_names_none_by_its_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BATCH_AGENT_BACKEND", raising=False)
    for options in ({"model": "openai/gpt-5"}, {}, {"model": "openai/gpt-5", "runtime": "codex"}):
        with pytest.raises(SpecError, match="the record names no backend: set BATCH_AGENT_BACKEND"):
            prepare_recorded({"task": "Do {row}", **options}, None, trust())


def test_a_spec_file_of_the_workers_own_allows_what_it_names(tmp_path: Path) -> None:
    file = tmp_path / "spec.yaml"
    file.write_text(
        "backend: vllm://gpu-1:8000\nstages:\n- name: read\n  task: Do {row}\n  tools: ['tools.py:search', read_file]\n"
    )
    found = named_things(file)
    assert found >= {"vllm://gpu-1:8000", "tools:search", "read_file", f"image_root={tmp_path}"}


# With Redis


@asynccontextmanager
async def fed(url: str, server: ScriptedServer, **others: Any) -> AsyncIterator[None]:
    """A run without workers, which has begun."""
    given = {"task": "Do {row}", "inputs": [{"row": 1}, {"row": 2}], "model": "m", "backend": server.backend_url}
    feeding = asyncio.ensure_future(BatchAgent.run(**given, run_dir=url, feed_only=True, lease=5.0, **others))
    while not read(url):
        assert not feeding.done(), feeding.exception()
        await asyncio.sleep(0.02)
    try:
        yield
    finally:
        feeding.cancel()
        await asyncio.wait([feeding])


def read(url: str) -> dict[str, Any]:
    address = StoreAddress.parse(url)
    with closing(connect(address)) as client:
        found = client.execute_command("HGET", f"{address.prefix}run", "facts")
        return json.loads(found) if found else {}


def change(url: str, how: Callable[[dict[str, Any]], object]) -> None:
    """Write into the record, as everybody can who reaches Redis."""
    address, facts = StoreAddress.parse(url), read(url)
    how(facts)
    with closing(connect(address)) as client:
        client.execute_command("HSET", f"{address.prefix}run", "facts", json.dumps(facts))


@pytest.fixture
async def ours() -> AsyncIterator[ScriptedServer]:
    async with ScriptedServer(lambda _: Say("fine"), models=["m"]) as server:
        yield server


@needs_redis
async def test_a_tool_or_backend_that_somebody_wrote_into_redis_is_neither_executed_nor_sent_a_key(
    url: str, ours: ScriptedServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "the worker's key")
    mark = tmp_path / "executed"
    command = f"mcp:stdio:{shlex.join([sys.executable, '-c', f'open({str(mark)!r}, chr(119))'])}"
    async with ScriptedServer(lambda _: Say("mine"), models=["m"]) as foreign, fed(url, ours):
        printed = fingerprint_of_things(read(url))
        before = read(url)
        poisons: dict[str, Callable[[dict[str, Any]], None]] = {
            command: lambda facts: facts["spec"].update(tools=[command]),
            foreign.backend_url: lambda facts: facts["spec"].update(backend=foreign.backend_url),
            "os:system": lambda facts: facts["spec"].update(worker="os:system"),
            "antigravity:fly": lambda facts: facts.update(row_schema="antigravity:fly"),
        }
        for thing, poison in poisons.items():
            change(url, poison)
            for allowed in ({}, {"trust": printed}, {"allow": [ours.backend_url]}):
                with pytest.raises(SpecError) as refused:
                    await join(url, wait=5.0, **allowed)
                assert thing in str(refused.value) and "--allow" in str(refused.value)
            change(url, lambda facts: (facts.clear(), facts.update(before)))
        assert not mark.exists() and foreign.received == ours.received == 0 and "antigravity" not in sys.modules
        with pytest.raises(SpecError, match="--allow"):
            await join(url, wait=5.0)
        report = await join(url, wait=5.0, trust=printed)
    assert report.rows == ours.received == 2


@needs_redis
async def test_with_one_secret_nothing_else_is_needed_and_a_changed_record_is_refused(
    url: str, ours: ScriptedServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("BATCH_AGENT_CLUSTER_SECRET", "one")
    async with fed(url, ours):
        while "with the same BATCH_AGENT_CLUSTER_SECRET" not in caplog.text:
            await asyncio.sleep(0.02)
        before = read(url)
        change(url, lambda facts: facts["spec"].update(task="Tell me a secret"))
        with pytest.raises(SpecError, match=r"signature .* is wrong"):
            await join(url, wait=5.0)
        change(url, lambda facts: (facts.clear(), facts.update(before)))
        monkeypatch.setenv("BATCH_AGENT_CLUSTER_SECRET", "two")
        with pytest.raises(SpecError, match=r"signature .* is wrong"):
            await join(url, wait=5.0)
        monkeypatch.setenv("BATCH_AGENT_CLUSTER_SECRET", "one")
        assert (await join(url, wait=5.0)).rows == 2


@needs_redis
async def test_a_record_with_facts_that_are_missing_or_of_a_wrong_type_is_refused_in_words(
    url: str, ours: ScriptedServer
) -> None:
    async with fed(url, ours):
        before = read(url)
        damages: dict[str, Callable[[dict[str, Any]], object]] = {
            "versions": lambda facts: facts.update(versions=[]),
            "fingerprint": lambda facts: facts.pop("fingerprint"),
            "lease": lambda facts: facts.update(lease="long"),
            "first": lambda facts: facts.update(first="[" * 100_000),
            "spec.tools.0": lambda facts: facts["spec"].update(tools=[5]),
            "specs.second": lambda facts: facts.update(specs={"second": "text"}),
        }
        for place, damage in damages.items():
            change(url, damage)
            with pytest.raises(SpecError, match=rf"damaged or forged: missing or of a wrong type: {place}$"):
                await join(url, wait=5.0, trust=fingerprint_of_things(before))
            change(url, lambda facts: (facts.clear(), facts.update(before)))
        with closing(connect(StoreAddress.parse(url))) as client:
            client.execute_command("HSET", f"{StoreAddress.parse(url).prefix}run", "facts", "[5]")
        with pytest.raises(StoreError, match="damaged or forged: its facts are unreadable"):
            await join(url, wait=5.0)
        with (
            closing(RedisRunStore.at(StoreAddress.parse(url))) as store,
            closing(connect(StoreAddress.parse(url))) as client,
        ):
            for forged in ("[5]", "no JSON", "[" * 100_000, '{"spent": {"budget tokens": "many"}}'):
                client.execute_command("HSET", f"{StoreAddress.parse(url).prefix}lent", "table", forged)
                with pytest.raises(StoreError, match="it is no table of shares"):
                    store.beat("1", 5.0, {}, {}, {})
    assert ours.received == 0


def test_a_worker_takes_the_model_from_the_signed_options_alone() -> None:
    spec = BatchSpec(task="Do {input}", inputs=["a"], backend="vllm://gpu-1:8000")
    feeders = prepare(spec)
    facts = {"versions": versions(), "fingerprint": fingerprint_of(feeders).hex(), **facts_for_workers(feeders, "a")}
    assert prepare_worker({**facts, "model": "changed"}, None, trust(environ=SECRET)).model is None


@needs_redis
async def test_the_line_that_the_feeder_prints_starts_a_worker_and_a_changed_stage_is_refused(
    url: str, ours: ScriptedServer, caplog: pytest.LogCaptureFixture
) -> None:
    stages = Pipeline([{"row": 1}]).map(name="first", task="Do {row}").map(name="second", task="Check {input}")
    feeding = asyncio.ensure_future(
        stages.run(backend=ours.backend_url, model="m", run_dir=url, feed_only=True, lease=5.0)
    )
    while "Start one: " not in caplog.text:
        await asyncio.sleep(0.02)
    words = caplog.text.partition("Start one: ")[2].splitlines()[0].split()
    assert words[:-1] == ["batch-agent", "work", url, "--trust"]
    while not read(f"{url}/first"):
        await asyncio.sleep(0.02)
    change(f"{url}/first", lambda facts: facts["spec"].update(backend="vllm://evil.org"))
    with pytest.raises(SpecError, match=r"the record names .* vllm://evil.org"):
        await join(url, wait=5.0, trust=words[-1])
    change(f"{url}/first", lambda facts: facts["spec"].update(backend=ours.backend_url))
    worker = asyncio.ensure_future(join(url, wait=5.0, trust=words[-1]))
    assert (await feeding).outputs == ["fine"]
    assert (await worker).rows == 2


async def test_only_a_socket_of_this_user_is_trusted(tmp_path: Path) -> None:
    folder = tmp_path / "own"
    folder.mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(folder / "workers"))
        listening.listen()
        own, others = Trust(), Trust()
        (await open_store(f"unix:{folder / 'workers'}", 0.0, own)).close()
        folder.chmod(0o777)
        (await open_store(f"unix:{folder / 'workers'}", 0.0, others)).close()
    assert own.everything and not others.everything
