"""The only way to ask a model: slots, routing, timing, retries, outages, hedging and budgets."""
