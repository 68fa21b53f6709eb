"""The page: a run, live and afterwards, in a browser. It reads the record and writes nothing into a run directory."""
