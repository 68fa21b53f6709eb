"""The durable record of a run: its directory, its journal, and the rules for reusing records when the run is
resumed."""
