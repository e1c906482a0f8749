"""Benchmarks: the queue beside what a user would take instead, and beside what the machine can do. Start at
README.md."""
