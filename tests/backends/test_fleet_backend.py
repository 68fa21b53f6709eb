"""A fleet keeps the contract of every backend."""

from __future__ import annotations

from backends.chat_contract import ChatContract
from batch_agent import Fleet
from batch_agent.backends.base import Backend


class TestFleet(ChatContract):
    def backend(self, url: str) -> Backend:
        return Fleet([url])
