"""JSON schemas, as servers accept them."""
