import pytest

# The contract's assertions tell both sides when they fail, as those of test modules do.
pytest.register_assert_rewrite("batch_agent.testing.contract")
