"""``batch-agent serve``: the batch APIs of OpenAI and Anthropic on one's own servers, and their tenants. Its
``status``, ``list``, ``cancel`` and ``export`` take the address of a server and a key, or its ``--data``."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import re
import shutil
import sys
import time
import tomllib
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, BinaryIO, cast

import orjson
from pydantic import JsonValue

from batch_agent.backends.address import check_known
from batch_agent.cli.exit_status import PART_FAILED
from batch_agent.cli.interrupts import serve
from batch_agent.cli.output.results import opened_output
from batch_agent.cli.output.streams import put, say
from batch_agent.cli.spec.numbers import add_address, amount, byte_count, positive
from batch_agent.errors import SpecError, about
from batch_agent.messages import JsonObject
from batch_agent.observe.text import clock
from batch_agent.record.address import StoreAddress
from batch_agent.record.lock import is_locked
from batch_agent.serve import DEFAULT_PORT, LatencyTarget, ServeOptions
from batch_agent.serve.catalog import Catalog, ConfiguredTenant, ServedBatch, Tenant, check_tenant_name
from batch_agent.serve.directory import ADDRESS_FILE, ERRORS, KEY_FILE, LOCK_FILE, OUTPUT, PART
from batch_agent.serve.logs import FORMATS
from batch_agent.serve.objects import batch_object, shown_beside

logger = logging.getLogger("batch_agent")

ADMIN = {
    "status": "show the state of a server",
    "list": "list the batches, newest first",
    "cancel": "cancel a batch",
    "export": "write the outcomes of a batch as JSON lines",
}
DATA_HELP = "directory of files, batches and keys (default %(default)s)"

SECONDS = 60.0
ASK_SECONDS = 2.0  # for a server that may have ended


def add_serve_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--backend", metavar="URL", help="backend of all models that it lists: fleet://hosts.txt, …")
    parser.add_argument(
        "--model", metavar="NAME=URL", action="append", default=[], help="backend of one model; may be repeated"
    )
    parser.add_argument("--config", metavar="FILE", help='TOML file: [models."name"] backend = "URL"; limits; keys')
    parser.add_argument("--data", default="serve", metavar="DIR", help=DATA_HELP)
    add_address(parser, DEFAULT_PORT)
    for name, (read, default, told) in LIMITS.items():
        flag, shown = f"--{name.replace('_', '-')}", f"{told} (default {default})"
        parser.add_argument(flag, type=read, metavar=METAVARS.get(name, "N"), help=shown)
    parser.add_argument(
        "--shared", action="store_true", help="several processes serve the same --data: each may be stopped at any time"
    )
    parser.add_argument(
        "--store",
        metavar="URL",
        default="",
        help="redis://host:6379/0, so that batch-agent work adds machines; implies --shared",
    )
    parser.add_argument(
        "--log", choices=FORMATS, default="text", help="form of the log on standard error (default %(default)s)"
    )
    actions = parser.add_subparsers(dest="action", metavar="ACTION")
    _add_keys(actions.add_parser("keys", help="add, list and revoke tenants, and rotate their keys"))
    check = actions.add_parser("check", help="verify --data, and print what a start of the server would do")
    check.add_argument("--data", default="serve", metavar="DIR", help=DATA_HELP)
    check.add_argument("--json", action="store_true", help="print JSON")
    backup = actions.add_parser("backup", help="copy --data to a new directory, also while the server runs")
    backup.add_argument("directory", metavar="DIR", help="the new directory")
    backup.add_argument("--data", default="serve", metavar="DIR", help=DATA_HELP)
    for name, told in ADMIN.items():
        action = actions.add_parser(name, help=told)
        if name in ("cancel", "export"):
            action.add_argument("batch", metavar="BATCH", help="id of the batch")
        if name == "export":
            action.add_argument("--output", metavar="FILE", help="(default: standard output)")
        else:
            action.add_argument("--json", action="store_true", help="print JSON")
        action.add_argument("--data", default="serve", metavar="DIR", help=DATA_HELP)
        action.add_argument("--url", help="address of the server; without it, --data is read")
        action.add_argument("--key", help="key of a tenant or of the operator, for --url (default: OPENAI_API_KEY)")


def _add_keys(parser: argparse.ArgumentParser) -> None:
    does = parser.add_subparsers(dest="does", required=True, metavar="ACTION")
    add = does.add_parser("add", help="add a tenant, and print its key")
    add.add_argument("name", metavar="NAME")
    for term, (read, metavar, told) in TERMS.items():
        add.add_argument(f"--{term.replace('_', '-')}", type=read, metavar=metavar, help=told)
    revoke = does.add_parser("revoke", help="revoke the key of a tenant, and cancel its batches")
    revoke.add_argument("name", metavar="NAME")
    rotate = does.add_parser("rotate", help="give a tenant a new key, and print it; the former one works for a while")
    rotate.add_argument("name", metavar="NAME")
    rotate.add_argument(
        "--overlap", type=_overlap, default=86400.0, metavar="TIME", help="that the former key works (default 24h)"
    )
    for each in (add, rotate, revoke, does.add_parser("list", help="list the tenants")):
        each.add_argument("--data", default="serve", metavar="DIR", help=DATA_HELP)


def serve_command(options: argparse.Namespace) -> int:
    if options.action == "keys":
        return _keys(options)
    if options.action == "check":
        return _check(options)
    if options.action == "backup":
        return _back_up(options)
    if options.action is not None:
        return admin_command(options)
    from batch_agent.serve.logs import log_as
    from batch_agent.serve.models import names_in, open_models
    from batch_agent.serve.parts import PartFailed
    from batch_agent.serve.server import BatchService

    log_as(options.log)
    tell, complain = (logger.info, logger.error) if options.log == "json" else (say, say)
    config = _config(options.config)
    check_known(config, ("backend", "models", "limits", "keys"), "--config has no table")
    models = {**_models_in(config), **names_in(options.model)}
    backend = options.backend or config.get("backend")
    server = BatchService(
        ServeOptions(
            Path(options.data),
            options.host,
            options.port,
            shared=options.shared,
            store=_store(options.store),
            **_limits(options, config),
        ),
        open_models(None if backend is None else str(backend), models),
        None if options.config is None else [_tenant_in(*each) for each in _tables(config, "keys").items()],
    )

    async def ready(address: str, key: str) -> None:
        put(address)
        put(f"OPENAI_BASE_URL={address}/v1 OPENAI_API_KEY={key}")
        put(f"ANTHROPIC_BASE_URL={address} ANTHROPIC_API_KEY={key}")
        sys.stdout.flush()
        if server.joining:
            tell(f"to add a machine: {server.joining}")
        tell("Ctrl-C stops the server; batches continue when it is started again")
        await asyncio.get_running_loop().create_future()

    try:
        status = serve(server.serve(ready), last_word="")
        tell("stopped")
        return status
    except PartFailed as failed:
        complain(f"batch-agent serve ends, so that its supervisor starts it again: {failed}")
        return PART_FAILED


def _store(url: str) -> str:
    """Return the URL of a Redis server, without a slash at its end. Raises SpecError."""
    if url and StoreAddress.parse(url, named=False).name:
        raise SpecError("--store names a server, without the name of a run: redis://host:6379/0")
    return url.rstrip("/")


def _keys(options: argparse.Namespace) -> int:
    from batch_agent.serve.webhooks import new_secret

    with Catalog(Path(options.data)) as catalog:
        catalog.operator_key()
        if options.does == "list":
            for tenant in catalog.tenants():
                limits = [f"share {tenant.share:g}", f"max-queued {tenant.max_queued}", f"max-file {tenant.max_file}"]
                for term in ("tokens_per_day", "max_files", "max_bytes"):
                    if (value := getattr(tenant, term)) is not None:
                        limits.append(f"{term.replace('_', '-')} {value}")
                if tenant.webhook:
                    limits.append(f"webhook {tenant.webhook}")
                if tenant.configured:
                    limits.append("in the configuration")
                put(f"{tenant.label}  {'  '.join(limits)}")
            return 0
        if options.does == "revoke":
            revoked = catalog.revoke(options.name)
            say(f"the key of {options.name} is revoked; its batches are cancelled")
            if revoked.configured:
                say("it is in the configuration: remove it there too, or the next start of the server accepts it again")
            return 0
        if options.does == "rotate":
            put(catalog.rotate_key(options.name, options.overlap))
            say(f"the former key of {options.name} is accepted for {options.overlap:g} s more")
            return 0
        check_tenant_name(options.name)
        secret = new_secret() if options.webhook else ""
        terms: dict[str, Any] = {term: value for term in TERMS if (value := getattr(options, term)) is not None}
        put(catalog.add_tenant(Tenant(options.name, **terms, secret=secret)))
        if secret:
            say(f"webhook secret: {secret}")
    return 0


def _check(options: argparse.Namespace) -> int:
    """Print what a start would find in a data directory. Returns 1 if there is anything."""
    from batch_agent.serve.recovery import check

    catalog, findings = check(Path(options.data))
    with catalog:
        unfinished = catalog.unfinished()
        batches = catalog.ids("batch")
        files = catalog.ids("file")
    if options.json:
        found = [{"part": each.part, "problem": each.problem, "done": each.done} for each in findings]
        put(orjson.dumps({"batches": len(batches), "files": len(files), "findings": found}).decode())
        return int(bool(findings))
    left = sum(batch.total - batch.completed - batch.failed for batch in unfinished)
    known = f"{len(batches)} batches, {len(unfinished)} of them not ended, and {len(files)} files"
    put(f"the catalog of {options.data} has {known}")
    for finding in findings:
        put(str(finding))
    if unfinished:
        put(f"a start continues {len(unfinished)} batches, with about {left} lines that have no outcome")
    if not findings:
        put("everything is in order")
    return int(bool(findings))


def _back_up(options: argparse.Namespace) -> int:
    from batch_agent.serve.backup import back_up

    done = back_up(Path(options.data), Path(options.directory))
    for name in done.missing:
        say(f"{name} is not in the backup: it was not there")
    put(f"wrote {options.directory}: {done.batches} batches and {done.files} files, {done.bytes:,} bytes")
    return 0


def _config(path: str | None) -> Mapping[str, object]:
    if path is None:
        return {}
    try:
        return tomllib.loads(Path(path).read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise SpecError(f"--config {path}: {error}") from None


def _tables(config: Mapping[str, object], name: str) -> dict[str, dict[str, object]]:
    """Return the tables below a name, such as those of [keys.alice]."""
    tables = config.get(name, {})
    if not isinstance(tables, dict) or not all(isinstance(table, dict) for table in tables.values()):
        raise SpecError(f'--config: {name} has tables, such as [{name}."name"]')
    return tables


def _models_in(config: Mapping[str, object]) -> dict[str, str | Mapping[str, object]]:
    found: dict[str, str | Mapping[str, object]] = {}
    for name, told in _tables(config, "models").items():
        if not isinstance(told.get("backend"), str):
            raise SpecError(f'--config: models."{name}" needs backend = "URL"')
        rest = {key: value for key, value in told.items() if key != "backend"}
        found[name] = {"url": told["backend"], **rest}
    return found


def _limits(options: argparse.Namespace, config: Mapping[str, object]) -> dict[str, Any]:
    """Return each limit: the value of its flag, else of the file, else its default."""
    given = config.get("limits", {})
    if not isinstance(given, dict):
        raise SpecError("--config: limits is a table")
    check_known(given, LIMITS, "--config: limits has no")
    found: dict[str, Any] = {}
    for name, (read, default, _) in LIMITS.items():
        value = getattr(options, name)
        if value is None and (name in given or default != FOUND):
            try:
                value = read(str(given.get(name, default)))
            except (argparse.ArgumentTypeError, ValueError) as error:
                raise SpecError(f"--config: {name} {error}") from None
        found[name] = None if value == OFF else value
    return found


def _tenant_in(name: str, terms: Mapping[str, object]) -> ConfiguredTenant:
    """Return a tenant of the file."""
    with about(f"--config: keys.{name}: "):
        check_tenant_name(name)
    check_known(terms, ("key", "old_key", *TERMS, "webhook_secret"), f"--config: keys.{name} has no")
    key = terms.get("key")
    old = terms.get("old_key", "")
    secret = terms.get("webhook_secret", "")
    if not isinstance(key, str) or len(key) < 16:
        raise SpecError(f"--config: keys.{name} needs key = a text of at least 16 characters")
    if not isinstance(old, str) or (old and len(old) < 16):
        raise SpecError(f"--config: keys.{name}.old_key is a text of at least 16 characters")
    if terms.get("webhook") and not str(secret).startswith("whsec_"):
        raise SpecError(f'--config: keys.{name} needs webhook_secret = "whsec_…" for its webhook')
    try:
        read: dict[str, Any] = {term: TERMS[term][0](str(terms[term])) for term in TERMS if term in terms}
    except (argparse.ArgumentTypeError, ValueError) as error:
        raise SpecError(f"--config: keys.{name}: {error}") from None
    return ConfiguredTenant(Tenant(name, **read, secret=str(secret)), key, old)


def byte_size(text: str) -> int:
    """Read a number of bytes, such as 1GB."""
    return byte_count(text.upper().removesuffix("IB").removesuffix("B") or text)


def duration(text: str) -> float:
    """Read a number with s, m, h or d, in seconds."""
    from batch_agent.serve.objects import seconds_in

    seconds = seconds_in(text)
    if seconds is None:
        raise argparse.ArgumentTypeError(f"must be a number with s, m, h or d, such as 24h, not {text!r}")
    return seconds


def _overlap(text: str) -> float:
    return 0.0 if text in ("0", "0s") else duration(text)


OFF, FOUND = "off", "found"


LATENCY = re.compile(r"(?:p(\d\d)\s+)?(\d+(?:\.\d+)?)")
LATENCY_TOLD = 'must be a number above 1, for the median, one with a percentile (p50 to p99), such as "p95 3", or off'


def _latency(text: str) -> float | LatencyTarget | str:
    """Read a factor, one of a percentile, or ``off``."""
    if text == OFF:
        return OFF
    read = LATENCY.fullmatch(text.strip())
    if read is None or not 1 < float(read[2]) < 1e6 or not 50 <= int(read[1] or 50) <= 99:
        raise argparse.ArgumentTypeError(f"{LATENCY_TOLD}, not {text!r}")
    return LatencyTarget(float(read[2]), int(read[1])) if read[1] else float(read[2])


# Each limit with its reader, its default, and its help.
LIMITS: Mapping[str, tuple[Callable[[str], object], object, str]] = {
    "interactive_latency": (
        _latency,
        2.5,
        "latency of interactive requests that is held, times that of an idle engine: of the median, or of a "
        'percentile, such as "p95 3"; off for none',
    ),
    "max_lines": (positive, 1_000_000, "lines of a batch at most"),
    "max_inflight": (positive, FOUND, "requests in flight at most"),
    "reserve": (byte_size, "1GB", "disk that stays free"),
    "keep": (duration, "30d", "how long batches are kept after their end"),
    "anthropic_window": (duration, "24h", "deadline of Message Batches"),
    "outage_patience": (duration, "60s", "how long interactive requests wait out an outage, before they get 503"),
    "drain": (duration, "5s", "how long answers in flight may take when the server is stopped"),
}
# Each term of a tenant with its reader, the name of its value, and its help. ``Tenant`` has the defaults.
TERMS: Mapping[str, tuple[Callable[[str], object], str, str]] = {
    "share": (amount, "SHARE", "weight beside other tenants (default 1)"),
    "max_queued": (positive, "N", "lines that may wait (default 1000000)"),
    "tokens_per_day": (positive, "N", "after which lines wait (default: any number)"),
    "max_file": (byte_size, "SIZE", "of one file (default 2GB)"),
    "max_files": (positive, "N", "files that it may have (default: any number)"),
    "max_bytes": (byte_size, "SIZE", "of all its files together (default: any number)"),
    "webhook": (str, "URL", "gets a signed notice when a batch ends"),
}
METAVARS = {"interactive_latency": "FACTOR", "reserve": "SIZE"} | dict.fromkeys(
    ("keep", "anthropic_window", "outage_patience", "drain"), "TIME"
)


def admin_command(options: argparse.Namespace) -> int:
    if options.action == "export":
        return _export(options)
    if options.url:
        with _open(options) as answer:
            document: JsonObject = orjson.loads(answer.read())
    else:
        running = _running(options) if options.action == "status" else None
        document = _read(options) if running is None else running
    if options.json:
        put(orjson.dumps(document, option=orjson.OPT_INDENT_2).decode())
    elif options.action == "list":
        for line in _listed(document):
            put(line)
    elif options.action == "cancel":
        put(f"{document['id']} is {document['status']}: {document['summary']}")
    else:
        if "uptime_seconds" not in document:
            put(f"no running server answered; this is what {options.data} has:")
        for line in _told(document):
            put(line)
    return 0


def _told(document: Mapping[str, Any]) -> Iterator[str]:
    """Yield the state of a server in words. A tenant sees less of it; without a running server, the data directory says
    still less."""
    yield f"{_count(document['batches'], 'unfinished batch', 'es')}, {_count(document['lines_left'], 'line')} left"
    if (flying := document.get("lines_in_flight")) is not None:
        yield f"{_count(flying, 'line')} in flight"
    if document.get("waiting_because"):
        yield f"waiting: {document['waiting_because']}"
    if people := document.get("interactive"):
        now = f"{people['in_flight']:,} in flight, {people['waiting']:,} waiting"
        yield f"interactive requests: {now}, {people['requests']:,} since the start"
    if ratio := document.get("latency_ratio"):
        target = f"; target {document['latency_target']} times" if document.get("latency_target") else ""
        yield f"latency of interactive requests: {ratio:.1f} times that of an idle engine{target}"
    if document.get("target_given_up"):
        yield str(document["target_given_up"])
    used = document.get("tokens_today")
    if isinstance(used, int):
        yield f"tokens today (UTC): {used:,}{_reserved(document)}"
    for name, tokens in sorted(used.items()) if isinstance(used, dict) else ():
        yield f"{name}: {tokens:,} tokens today (UTC)"
    for name, each in document.get("tenants", {}).items():
        tokens = f"{each['tokens_today']:,} tokens today (UTC){_reserved(each)}"
        yield f"{name}: {tokens}, {_count(each['lines_in_flight'], 'line')} in flight, share {each['share']}"
    for each in document.get("endpoints", ()):
        yield _endpoint_line(each)
    if (up := document.get("uptime_seconds")) is not None:
        yield f"running for {clock(up)}"


def _count(amount: int, noun: str, plural: str = "s") -> str:
    return f"{amount:,} {noun}{'' if amount == 1 else plural}"


def _reserved(account: Mapping[str, Any]) -> str:
    return f", {account['tokens_reserved']:,} more reserved" if account.get("tokens_reserved") else ""


def _endpoint_line(each: Mapping[str, Any]) -> str:
    """Return the line of a server of a model. If the server cannot answer, the line says since when, why, and what it
    needs."""
    if each["up"]:
        return f"{each['upstream']}: up, {each['in_flight']} in flight"
    since = datetime.fromtimestamp(float(str(each["since"])), UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    again = f"tried again in {each['next_trial_seconds']} s"
    return f"{each['upstream']}: down since {since}: {each['why']}: {each['reason']}; {again}; it needs {each['needs']}"


def _listed(document: JsonObject) -> Iterator[str]:
    for batch in cast("list[JsonObject]", document["data"]):
        yield f"{batch['id']}  {batch['status']}  {batch['tenant']}  {batch['endpoint']}  {batch['summary']}"


# By address


def _open(options: argparse.Namespace) -> BinaryIO:
    if options.action in ("cancel", "export"):
        path = f"batches/{options.batch}/{options.action}"
    else:
        path = "status" if options.action == "status" else "batches?limit=1000"
    url = f"{options.url.rstrip('/').removesuffix('/v1')}/serve/{path}"
    if not url.startswith(("http://", "https://")):
        raise SpecError(f"--url {options.url}: write http://HOST:PORT")
    key = options.key or os.environ.get("OPENAI_API_KEY", "")
    method = "POST" if options.action == "cancel" else "GET"
    request = urllib.request.Request(url, method=method, headers={"Authorization": f"Bearer {key}"})
    try:
        opened: BinaryIO = urllib.request.urlopen(request, timeout=SECONDS)
    except urllib.error.HTTPError as error:
        raise SpecError(f"{url} answered {error.code}: {_message(error.read())}") from None
    except OSError as error:
        raise SpecError(f"{url}: {getattr(error, 'reason', error)}") from None
    return opened


def _message(body: bytes) -> str:
    try:
        return str(orjson.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return body[:200].decode("utf-8", "replace")


# By the directory


def _running(options: argparse.Namespace) -> JsonObject | None:
    """Return the state of the running server of these data. None if no server runs on this machine, or if several share
    the data."""
    data = Path(options.data)
    if not is_locked(data / LOCK_FILE):  # else another program may listen there now, and would get the key
        return None
    try:
        url, key = (data / ADDRESS_FILE).read_text(), (data / KEY_FILE).read_text()
        request = urllib.request.Request(f"{url}/serve/status", headers={"Authorization": f"Bearer {key.strip()}"})
        with urllib.request.urlopen(request, timeout=ASK_SECONDS) as answer:
            document: JsonObject = orjson.loads(answer.read())
    except (OSError, ValueError):
        return None
    return document


def _catalog(options: argparse.Namespace) -> Catalog:
    data = Path(options.data)
    if not (data / "serve.db").exists():
        raise SpecError(f"{data} is not the --data of a server: there is no serve.db; or give --url and --key")
    return Catalog(data)


def _read(options: argparse.Namespace) -> JsonObject:
    with _catalog(options) as catalog:
        if options.action == "status":
            unfinished = catalog.unfinished()
            left = sum(batch.total - batch.completed - batch.failed for batch in unfinished)
            today: dict[str, JsonValue] = {**catalog.used_today()}
            return {"batches": len(unfinished), "lines_left": left, "tokens_today": today}
        if options.action == "list":
            return {"data": [_shown(batch) for batch in catalog.batches(None, limit=1000)]}
        changed = catalog.change_batch(options.batch, lambda batch: batch.cancelled_at(time.time()))
        if changed is None:
            raise SpecError(f"there is no batch {options.batch!r}")
        return _shown(changed)


def _shown(batch: ServedBatch) -> JsonObject:
    return {**batch_object(batch, None), **shown_beside(batch)}


def _export(options: argparse.Namespace) -> int:
    with ExitStack() as opened:
        sources = [opened.enter_context(source) for source in _sources(options)]
        with opened_output(None if options.output is None else Path(options.output)) as file:
            for source in sources:
                shutil.copyfileobj(source, file)
    if options.output is not None:
        say(f"wrote {options.output}")
    return 0


def _sources(options: argparse.Namespace) -> Iterator[BinaryIO]:
    """Yield the open files with the outcomes of a batch."""
    if options.url:
        yield _open(options)
        return
    with _catalog(options) as catalog:
        if catalog.batch(options.batch) is None:
            raise SpecError(f"there is no batch {options.batch!r}")
    folder = Path(options.data) / "batches" / options.batch
    for name in (OUTPUT, ERRORS, OUTPUT + PART, ERRORS + PART):
        if (folder / name).exists():
            yield (folder / name).open("rb")
