"""``batch-agent serve``: the batch APIs of OpenAI and Anthropic on one's own servers, and their tenants."""

from __future__ import annotations

import argparse
import asyncio
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path

from batch_agent.cli.interrupts import serve
from batch_agent.cli.output.streams import put, say
from batch_agent.cli.spec.numbers import add_address, amount, byte_count, number, positive
from batch_agent.errors import SpecError

DATA_HELP = "directory of files, batches and keys (default %(default)s)"


def add_serve_arguments(parser: argparse.ArgumentParser) -> None:
    from batch_agent.serve.server import DEFAULT_PORT

    parser.add_argument("--backend", metavar="URL", help="backend of all models that it lists: fleet://hosts.txt, …")
    parser.add_argument(
        "--model", metavar="NAME=URL", action="append", default=[], help="backend of one model; may be repeated"
    )
    parser.add_argument("--config", metavar="FILE", help='TOML file: [models."name"] backend = "URL"; limits; keys')
    parser.add_argument("--data", default="serve", metavar="DIR", help=DATA_HELP)
    add_address(parser, DEFAULT_PORT)
    parser.add_argument(
        "--interactive-latency",
        type=_latency,
        default=2.5,
        metavar="FACTOR",
        help="latency of interactive requests that is held, times that of an idle engine; off for none "
        "(default %(default)s)",
    )
    parser.add_argument("--max-lines", type=positive, default=1_000_000, help="of a batch (default %(default)s)")
    parser.add_argument("--max-inflight", type=positive, help="requests in flight at most (default: found)")
    parser.add_argument(
        "--reserve", type=byte_size, default="1GB", metavar="SIZE", help="disk that stays free (default %(default)s)"
    )
    parser.add_argument(
        "--keep", type=duration, default="30d", metavar="TIME", help="how long batches are kept (default %(default)s)"
    )
    parser.add_argument(
        "--anthropic-window", type=duration, default="24h", metavar="TIME", help="of Message Batches (default 24h)"
    )
    actions = parser.add_subparsers(dest="action", metavar="ACTION")
    _add_keys(actions.add_parser("keys", help="add, list and revoke tenants"))


def _add_keys(parser: argparse.ArgumentParser) -> None:
    does = parser.add_subparsers(dest="does", required=True, metavar="ACTION")
    add = does.add_parser("add", help="add a tenant, and print its key")
    add.add_argument("name", metavar="NAME")
    add.add_argument("--share", type=amount, default=1.0, help="weight beside other tenants (default 1)")
    add.add_argument("--max-queued", type=positive, default=1_000_000, help="lines that may wait (default %(default)s)")
    add.add_argument("--tokens-per-day", type=positive, help="after which lines wait (default: any number)")
    add.add_argument("--max-file", type=byte_size, default="2GB", metavar="SIZE", help="(default %(default)s)")
    add.add_argument("--webhook", metavar="URL", default="", help="gets a signed notice when a batch ends")
    revoke = does.add_parser("revoke", help="revoke the key of a tenant, and cancel its batches")
    revoke.add_argument("name", metavar="NAME")
    for each in (add, revoke, does.add_parser("list", help="list the tenants")):
        each.add_argument("--data", default="serve", metavar="DIR", help=DATA_HELP)


def serve_command(options: argparse.Namespace) -> int:
    if options.action == "keys":
        return _keys(options)
    from batch_agent.serve.models import names_in, open_models
    from batch_agent.serve.server import BatchApiServer, ServeOptions

    config = _config(options.config)
    models = {**_models_in(config), **names_in(options.model)}
    backend = options.backend or config.get("backend")
    server = BatchApiServer(
        ServeOptions(
            Path(options.data),
            options.host,
            options.port,
            options.max_lines,
            options.reserve,
            options.keep,
            options.anthropic_window,
            options.interactive_latency,
            options.max_inflight,
        ),
        open_models(None if backend is None else str(backend), models),
    )

    async def ready(address: str, key: str) -> None:
        put(address)
        put(f"OPENAI_BASE_URL={address}/v1 OPENAI_API_KEY={key}")
        put(f"ANTHROPIC_BASE_URL={address} ANTHROPIC_API_KEY={key}")
        sys.stdout.flush()
        say("Ctrl-C stops the server; batches continue when it is started again")
        await asyncio.get_running_loop().create_future()

    return serve(server.serve(ready))


def _keys(options: argparse.Namespace) -> int:
    from batch_agent.serve.catalog import Catalog, Tenant
    from batch_agent.serve.webhooks import new_secret

    with Catalog(Path(options.data)) as catalog:
        catalog.operator_key()
        if options.does == "list":
            for tenant in catalog.tenants():
                limits = [f"share {tenant.share:g}", f"max-queued {tenant.max_queued}", f"max-file {tenant.max_file}"]
                if tenant.tokens_per_day is not None:
                    limits.append(f"tokens-per-day {tenant.tokens_per_day}")
                if tenant.webhook:
                    limits.append(f"webhook {tenant.webhook}")
                put(f"{tenant.name}  {'  '.join(limits)}")
            return 0
        if options.does == "revoke":
            catalog.revoke(options.name)
            say(f"the key of {options.name} is revoked; its batches are cancelled")
            return 0
        if not options.name.replace("-", "").replace("_", "").replace(".", "").isalnum() or len(options.name) > 64:
            raise SpecError("the name of a tenant has letters, digits, '-', '_' and '.', and at most 64 of them")
        secret = new_secret() if options.webhook else ""
        tenant = Tenant(
            options.name,
            options.share,
            options.max_queued,
            options.tokens_per_day,
            options.max_file,
            options.webhook,
            secret,
        )
        put(catalog.add_tenant(tenant))
        if secret:
            say(f"webhook secret: {secret}")
    return 0


def _config(path: str | None) -> Mapping[str, object]:
    if path is None:
        return {}
    try:
        return tomllib.loads(Path(path).read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise SpecError(f"--config {path}: {error}") from None


def _models_in(config: Mapping[str, object]) -> dict[str, str | Mapping[str, object]]:
    models = config.get("models", {})
    if not isinstance(models, dict):
        raise SpecError('--config: models is a table, such as [models."name"]')
    found: dict[str, str | Mapping[str, object]] = {}
    for name, told in models.items():
        if not isinstance(told, dict) or not isinstance(told.get("backend"), str):
            raise SpecError(f'--config: models."{name}" needs backend = "URL"')
        rest = {key: value for key, value in told.items() if key != "backend"}
        found[name] = {"url": told["backend"], **rest}
    return found


def _latency(text: str) -> float | None:
    return None if text == "off" else number(float, lambda value: 1 < value < 1e6, "a number above 1, or off")(text)


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
