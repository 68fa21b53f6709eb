"""Assertions of the contract suite, which is in the package, explain themselves like those of tests."""

import pytest

pytest.register_assert_rewrite("batch_agent.testing.run_store_contract", "batch_agent.testing.store_durability")
