"""JSON schemas, as servers take them."""
