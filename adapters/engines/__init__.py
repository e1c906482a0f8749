"""Inference engines as producers; vLLM has a package of its own (`adapters.vllm`)."""
