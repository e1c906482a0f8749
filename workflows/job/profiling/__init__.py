"""Measures a job for the planner: its engine, its trainer, its rewards and its publication, one after the other."""
