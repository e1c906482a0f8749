"""Starts and finds the processes of one deployment."""
