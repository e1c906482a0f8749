"""Traces of rows for OpenTelemetry: a trace spans a row from its put to its end, with a span for each lease."""
