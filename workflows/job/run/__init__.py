"""Runs a job: its folder, its server, its processes, their reports, and the summary at the end. No torch here."""
