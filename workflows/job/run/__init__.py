"""Runs a job: its folder, its server, its processes, what they report, and the summary at the end. No torch here."""
