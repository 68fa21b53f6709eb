"""The command line. It reads files and writes to terminals; other packages implement the run."""
