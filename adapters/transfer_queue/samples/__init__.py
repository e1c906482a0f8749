"""Storage of the drop-in: partitions as tables, samples by key and index, their columns and tags."""
