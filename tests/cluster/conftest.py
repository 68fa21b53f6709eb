"""Without Ray, its half of this folder is left out; ``make test-cluster`` has it."""

from importlib.util import find_spec

collect_ignore = [] if find_spec("ray") else ["test_ray.py", "test_faults.py"]
