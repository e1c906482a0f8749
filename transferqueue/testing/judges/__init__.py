"""Judges of histories: one file for each kind of promise. See `transferqueue.testing.checker`."""
