"""Checks a history against the promises."""
