"""The contract of backends: a test suite that authors of backends inherit, here and outside of this repository.

It needs pytest and pytest-asyncio, so ``batch_agent.testing`` does not import it. docs/contract.md shows how to use it.
"""
