"""The durable record of a run: its directory, its journal, and what of it is still valid when the run is resumed."""
