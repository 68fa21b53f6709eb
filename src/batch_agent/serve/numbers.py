"""The page of a server for Prometheus: lines, tokens, batches and files by tenant, people, servers and faults.

The number of labels with names of tenants is limited: the first ``MOST_TENANTS`` tenants that this process saw have
labels of their own, and all others share the label ``other``. A tenant that was revoked and a later one with the same
label are counted together.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from typing import TYPE_CHECKING

from batch_agent.observe.exposition import OTHER, Counter, Family, Gauge, page
from batch_agent.serve.catalog import label_of

if TYPE_CHECKING:
    from batch_agent.serve.server import BatchService

NAME = "batch_agent_serve"
MOST_TENANTS = 50


class ServeNumbers:
    def __init__(self, service: BatchService) -> None:
        self._service = service
        self._labels: dict[str, str] = {}

    def page(self) -> str:
        """Return the page. Blocks."""
        own = [*self._of_tenants(), *self._of_batches(), *self._of_people(), *self._of_server()]
        return page([*own, *self._service.upstreams.numbers()])

    def _tenant(self, name: str) -> str:
        label = label_of(name)
        if label not in self._labels:
            self._labels[label] = label if len(self._labels) < MOST_TENANTS else OTHER
        return self._labels[label]

    def _gauge(self, name: str, text: str, values: Mapping[str, float]) -> Gauge:
        """Return a gauge with one value per tenant."""
        sums: dict[str, float] = {}
        for tenant, value in sorted(values.items()):
            label = self._tenant(tenant)
            sums[label] = sums.get(label, 0.0) + value
        gauge = Gauge(f"{NAME}_{name}", text, ("tenant",))
        for label, value in sums.items():
            gauge.set(value, label)
        return gauge

    def _of_tenants(self) -> list[Family]:
        line_scheduler, ledger = self._service.line_scheduler, self._service.ledger
        accounts = {name: account for name, account in tuple(line_scheduler.accounts.items()) if self._is_active(name)}
        tokens = Counter(f"{NAME}_tokens_total", "Tokens used since the start.", ("tenant",))
        done = Counter(f"{NAME}_lines_done_total", "Lines done since the start, by outcome.", ("tenant", "outcome"))
        for name, account in sorted(accounts.items()):
            tokens.add(account.tokens, self._tenant(name))
            for outcome, count in sorted(account.done.items()):
                done.add(count, self._tenant(name), outcome)
        limits = {name: limit for name in accounts if (limit := ledger.limit(name)) is not None}
        stored = self._service.catalog.stored()
        return [
            self._gauge("lines_in_flight", "Lines of batches in flight.", {n: a.inflight for n, a in accounts.items()}),
            tokens,
            done,
            self._gauge("tokens_today", "Tokens used today (UTC).", {name: ledger.today(name) for name in accounts}),
            self._gauge(
                "tokens_reserved", "Tokens reserved by requests in flight.", {n: ledger.reserved(n) for n in accounts}
            ),
            self._gauge("tokens_per_day", "Tokens allowed in a day.", limits),
            self._gauge("files", "Files stored.", {name: files for name, (files, _) in stored.items()}),
            self._gauge("stored_bytes", "Bytes of files stored.", {name: size for name, (_, size) in stored.items()}),
        ]

    def _is_active(self, tenant: str) -> bool:
        """Return whether a tenant has used anything today, or since the start. Other tenants get no label."""
        account, ledger = self._service.line_scheduler.account(tenant), self._service.ledger
        return bool(
            account.tokens or account.inflight or account.done or ledger.today(tenant) or ledger.reserved(tenant)
        )

    def _of_batches(self) -> list[Family]:
        service = self._service
        counts: dict[tuple[str, str], int] = {}
        left: dict[str, float] = {}
        for batch in map(service.batches.progress, service.catalog.unfinished()):
            key = self._tenant(batch.tenant), batch.status
            counts[key] = counts.get(key, 0) + 1
            left[batch.tenant] = left.get(batch.tenant, 0) + batch.total - batch.completed - batch.failed
        batches = Gauge(f"{NAME}_batches", "Batches that have not ended, by status.", ("tenant", "status"))
        for labels, count in sorted(counts.items()):
            batches.set(count, *labels)
        ended = Counter(f"{NAME}_batches_ended_total", "Batches that ended since the start.", ("tenant", "status"))
        for (tenant, end), count in sorted(service.batches.ended.items()):
            ended.add(count, self._tenant(tenant), end)
        return [batches, ended, self._gauge("lines_left", "Lines that are not done.", left)]

    def _of_people(self) -> list[Family]:
        people, governor = self._service.interactive, self._service.line_scheduler.governor
        ratio = "Latency of interactive requests over that of an idle engine."
        return [
            Counter(f"{NAME}_interactive_requests_total", "Interactive requests.").add(people.requests),
            Counter(f"{NAME}_interactive_failures_total", "Interactive requests that failed.").add(people.failures),
            Gauge(f"{NAME}_interactive_in_flight", "Interactive requests in flight.").set(governor.active),
            Gauge(f"{NAME}_interactive_latency_ratio", ratio).set(governor.ratio),
            people.seconds,
        ]

    def _of_server(self) -> list[Family]:
        service = self._service
        failures = Counter(f"{NAME}_part_failures_total", "Failures of a part of the server by a bug.", ("part",))
        for part, often in {**service.parts.failures, "batches": service.batches.failures}.items():
            failures.add(often, part)
        room = Gauge(f"{NAME}_disk_room", "Whether more than --reserve of the disk is free.").set(float(service.room))
        free = Gauge(f"{NAME}_disk_free_bytes", "Free bytes of the disk with --data.")
        try:
            free.set(shutil.disk_usage(service.options.data).free)
        except OSError:
            free.set(0)
        return [failures, room, free]
