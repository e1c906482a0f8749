"""Checks of the machine that the queue runs on."""
