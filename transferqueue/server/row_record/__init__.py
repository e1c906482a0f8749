"""Rows that ended, written into files beside the server's other work (`Recorded`)."""
