"""Network addresses that a tool may connect to when a model chooses the URL: public and explicitly allowed ones."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Sequence
from dataclasses import dataclass

from aiohttp.abc import AbstractResolver, ResolveResult
from aiohttp.resolver import ThreadedResolver

from batch_agent.errors import SpecError, ToolError

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network

# NAT64 (RFC 6052): the last 32 bits are an IPv4 address that the gateway will connect to.
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")


@dataclass(frozen=True, slots=True)
class AddressPolicy:
    """Refuses every address that is not globally routable, unless it lies in one of the ``allowed`` networks."""

    allowed: tuple[Network, ...] = ()

    @classmethod
    def allowing(cls, networks: Sequence[str]) -> AddressPolicy:
        try:
            return cls(tuple(ipaddress.ip_network(network) for network in networks))
        except ValueError as error:
            raise SpecError(f'allow takes addresses and networks, as "10.1.2.3" or "10.0.0.0/8": {error}') from None

    def permits(self, address: Address) -> bool:
        address = _target(address)
        return any(address in network for network in self.allowed) or _is_public(address)

    def check_host(self, host: str) -> None:
        """Check a host that is an IP address: aiohttp connects to it without the resolver. Raises ToolError."""
        if ":" not in host and not host.replace(".", "").isdigit():
            return
        try:
            address = ipaddress.ip_address(host)
        except ValueError:  # 127.1 or 2130706433: the socket layer accepts these forms
            raise ToolError(f"{host} is not an address in its usual form") from None
        if not self.permits(address):
            raise refusal(host)


class CheckedResolver(AbstractResolver):
    """Resolver that returns only addresses that the policy permits, so that the checked address is the one used."""

    def __init__(self, policy: AddressPolicy) -> None:
        self._policy = policy
        self._resolver = ThreadedResolver()

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        found = await self._resolver.resolve(host, port, family)
        permitted = [item for item in found if self._policy.permits(ipaddress.ip_address(item["host"]))]
        if not permitted:
            raise refusal(host)
        return permitted

    async def close(self) -> None:
        await self._resolver.close()


def refusal(host: str) -> ToolError:
    return ToolError(f"{host} is refused: only public addresses may be fetched, not local, private or reserved ones")


def _target(address: Address) -> Address:
    """Return the IPv4 address inside a mapped or NAT64 IPv6 address; else the address itself."""
    if isinstance(address, ipaddress.IPv4Address):
        return address
    if address in _NAT64:
        return ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    return address.ipv4_mapped or address


def _is_public(address: Address) -> bool:
    if isinstance(address, ipaddress.IPv6Address) and (
        # Old tunnels that contain an IPv4 address, and a private range that is_global does not exclude.
        address.sixtofour is not None or address.teredo is not None or address.is_site_local
    ):
        return False
    return address.is_global and not (address.is_multicast or address.is_reserved or address.is_unspecified)
