"""What a flow tells of its work: counts of rows, spans of time, and metrics."""
