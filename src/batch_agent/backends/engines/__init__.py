"""Self-hosted inference engines: vLLM, SGLang, Dynamo."""
