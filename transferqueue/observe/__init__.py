"""Metrics, verdicts, traces and machine checks of a deployment."""
