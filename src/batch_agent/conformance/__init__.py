"""Small questions that show what a server can do: ``batch-agent doctor --thorough``."""
