"""Batch Agent: input list in, structured result list out."""
