"""Starts and stops servers."""
