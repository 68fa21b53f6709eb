"""An agent: what it may do, and the tool loop."""
