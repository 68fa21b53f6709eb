"""Benchmarks: what Batch Agent costs, as ratios measured side by side in one run. See README.md."""
