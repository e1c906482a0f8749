"""Commands that show a running queue, its rows, and this machine."""
