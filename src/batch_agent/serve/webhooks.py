"""Webhooks: notices of batches that have ended, signed as OpenAI signs them (the Standard Webhooks form).

Notices are in the catalog until their receiver has accepted them, so that they survive restarts. A receiver that does
not answer with a status of 2xx is asked again, with longer and longer pauses, for three days. Each tenant has its own
queue of at most 1000 notices: a receiver that hangs delays only its own.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import logging
import secrets
from collections.abc import Callable

import orjson
from yarl import URL

from batch_agent.blocking import in_thread
from batch_agent.errors import SpecError, StoreError
from batch_agent.http.failures import TransportError
from batch_agent.http.transport import Transport
from batch_agent.serve.catalog import Catalog, Tenant

logger = logging.getLogger("batch_agent")

PREFIX = "whsec_"
ANSWER_SECONDS = 15.0
FIRST_PAUSE, LONGEST_PAUSE = 2.0, 3600.0
MOST_SECONDS = 3 * 86400.0
IDLE_SECONDS = 60.0


def new_secret() -> str:
    return f"{PREFIX}{base64.b64encode(secrets.token_bytes(32)).decode()}"


def signed(secret: str, id: str, timestamp: int, body: bytes) -> dict[str, str]:
    """Return the headers of a notice."""
    key = base64.b64decode(secret.removeprefix(PREFIX))
    text = b"%b.%d.%b" % (id.encode(), timestamp, body)
    signature = base64.b64encode(hmac.new(key, text, hashlib.sha256).digest()).decode()
    return {"webhook-id": id, "webhook-timestamp": str(timestamp), "webhook-signature": f"v1,{signature}"}


class Webhooks:
    """Sends notices. ``wake`` must be called when a notice was added."""

    def __init__(self, catalog: Catalog, now: Callable[[], float]) -> None:
        self._catalog, self._now = catalog, now
        self._woken = asyncio.Event()
        self._busy: set[str] = set()  # tenants to whom notices are being sent
        self.sent = self.failed = 0

    def wake(self) -> None:
        self._woken.set()

    async def run(self) -> None:
        """Send notices until cancelled, to all tenants at once."""
        self._busy.clear()
        async with Transport() as transport, asyncio.TaskGroup() as tasks:
            while True:
                self._woken.clear()
                pause = IDLE_SECONDS
                try:
                    now = self._now()
                    for tenant, due in (await in_thread(self._catalog.next_notices)).items():
                        if tenant in self._busy:
                            continue  # the end of its task wakes this one
                        if due <= now:
                            self._busy.add(tenant)
                            tasks.create_task(self._serve(transport, tenant))
                        else:
                            pause = max(0.05, min(pause, due - now))
                except StoreError as error:
                    logger.warning("%s", error)
                try:
                    async with asyncio.timeout(pause):
                        await self._woken.wait()
                except TimeoutError:
                    pass

    async def _serve(self, transport: Transport, tenant: str) -> None:
        """Send the notices to a tenant that are due, one after another."""
        try:
            for notice in await in_thread(self._catalog.due_notices, tenant):
                await self._send(transport, tenant, *notice)
        except StoreError as error:
            logger.warning("%s", error)
            await asyncio.sleep(FIRST_PAUSE)
        finally:
            self._busy.discard(tenant)
            self.wake()

    async def _send(self, transport: Transport, name: str, id: str, body: str, tries: int) -> None:
        tenants = await in_thread(self._catalog.tenants)
        tenant = next((tenant for tenant in tenants if tenant.name == name), None)
        if tenant is None or not tenant.webhook:
            await in_thread(self._catalog.remove_notice, id)
            return
        why = await self._post(transport, tenant, id, body.encode())
        if not why:
            self.sent += 1
            await in_thread(self._catalog.remove_notice, id)
            return
        self.failed += 1
        if self._now() - orjson.loads(body)["created_at"] > MOST_SECONDS:
            logger.warning("the notice %s to %s is given up: %s", id, name, why)
            await in_thread(self._catalog.remove_notice, id)
            return
        pause = min(LONGEST_PAUSE, FIRST_PAUSE * 2.0 ** min(tries, 20))
        await in_thread(self._catalog.postpone_notice, id, pause)

    async def _post(self, transport: Transport, tenant: Tenant, id: str, body: bytes) -> str:
        """Send a notice. Returns the reason why it was not accepted, or ""."""
        headers = {"Content-Type": "application/json", "User-Agent": "batch-agent"}
        try:
            headers |= signed(tenant.secret, id, int(self._now()), body)
            url = URL(tenant.webhook)
            async with asyncio.timeout(ANSWER_SECONDS):
                async with transport.open("POST", url, headers, body, proxy=transport.proxy_for(url)) as response:
                    return "" if 200 <= response.status < 300 else f"status {response.status}"
        except (TransportError, OSError, TimeoutError, ValueError, SpecError) as error:
            return f"{type(error).__name__}: {error}"
