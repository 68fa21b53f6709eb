"""The inputs of the command line: arguments, spec files, rows."""
