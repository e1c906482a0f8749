"""A tiny Qwen3 directory, made offline in seconds: model, tokenizer, chat template, prompts, and models that reward and
judge.

`python -m transferqueue.workflows.job.tiny_model --help` is the command; `make.make` the same from Python.
"""
