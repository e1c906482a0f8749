"""Reports of a flow's work: counts of rows, spans of time, and metrics."""
