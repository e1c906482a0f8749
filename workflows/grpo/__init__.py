"""Asynchronous GRPO of a small transformer on procedural tasks: the main job, made of queue stages.

The learning itself knows no queue: ``problems``, ``tokenizer`` and ``advantages`` need no torch, ``model``, ``sampling``,
``packing``, ``grpo``, ``warmup`` and ``evaluate`` do. Import what a process needs from the module that has it.
"""
