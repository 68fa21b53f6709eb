"""Files of rows and results: reads many formats, writes JSONL, CSV and Parquet.

Reading and writing is synchronous, one row at a time, so that no whole file is in memory. The command line handles
pipes and the event loop; ``record/rundir`` handles the run directory.
"""

from batch_agent.files.read import LazyRows, read_inputs

__all__ = ["LazyRows", "read_inputs"]
