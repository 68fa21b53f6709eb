"""Without Ray, its half of this folder is left out; ``make test-cluster`` has it."""

from importlib.util import find_spec

import pytest

collect_ignore = [] if find_spec("ray") else ["test_ray.py", "test_faults.py"]


@pytest.fixture(autouse=True)
def secret(monkeypatch: pytest.MonkeyPatch) -> None:
    """Feeders and workers have one secret, so workers need no flags; ``test_trust`` has the others."""
    monkeypatch.setenv("BATCH_AGENT_CLUSTER_SECRET", "of the tests")
