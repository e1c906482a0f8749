"""Asynchronous GRPO of a small transformer on procedural tasks: the main job, as stages of a queue.

`learning` and `model` use no queue. `learning.problems`, `learning.settings`, `model.tokenizer` and `model.shape`
need no torch; the other modules of these two folders do. Import what a process needs from the module that has it.
Advantages and the loss are those of every job: `transferqueue.workflows.job.algorithms`.
"""
