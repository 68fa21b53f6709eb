"""Inference engines that people run themselves: vLLM, SGLang, Dynamo."""
