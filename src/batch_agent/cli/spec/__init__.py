"""What the command line is told: arguments, spec files, rows."""
