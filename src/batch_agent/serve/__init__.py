"""``batch-agent serve``: the batch APIs of OpenAI and Anthropic, and interactive requests, in front of any backend."""
