"""Trainers of other projects, run whole without an accelerator: once with the original ``transfer_queue``, once with
the drop-in.

``python -m bench.stacks`` runs them and prints what they did; ``make test-stacks`` installs what they need.
"""
