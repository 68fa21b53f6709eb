"""An agent: its context, its conversation and the tool loop."""
