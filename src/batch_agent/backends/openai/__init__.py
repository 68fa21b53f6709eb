"""OpenAI's wires, `/chat/completions` and `/responses`, and the servers that speak them."""
