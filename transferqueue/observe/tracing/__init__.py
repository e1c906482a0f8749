"""Traces of rows for OpenTelemetry: a trace is one row's way from its put to its end, with a span for each lease."""
