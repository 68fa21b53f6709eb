"""The tools that come with the package; each module makes one, from a function that takes its settings."""
