"""Sends every model request: slots, routing, timeouts, retries, outages, hedging and budgets."""
