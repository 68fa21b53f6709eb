"""Rows and results as files: many formats in, JSONL, CSV and Parquet out.

Everything here is plain synchronous reading and writing, a row at a time, so that no file is ever in memory as a whole.
Pipes and the event loop belong to the command line, the run directory to ``store``.
"""

from batch_agent.files.read import LazyRows, read_inputs

__all__ = ["LazyRows", "read_inputs"]
