"""The command line. It reads files and terminals; what a run is belongs to the packages above."""
