"""Amounts of money as text, in one form everywhere."""

from __future__ import annotations

from decimal import Decimal


def dollars(cost: float) -> str:
    """Return ``$0``, ``$0.000082``, ``$0.12``, ``$1.23``, ``$1,234.50``: cents, or two digits of smaller amounts."""
    if abs(cost) >= 1:
        return f"${cost:,.2f}"
    return f"${Decimal(f'{cost:.2g}'):f}"


def limit_dollars(limit: float) -> str:
    """Return a limit as the user gave it: ``$15``, ``$2.345``, ``$0.00008``."""
    return f"${Decimal(f'{limit:g}'):f}"
