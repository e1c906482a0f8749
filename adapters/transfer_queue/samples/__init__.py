"""What the drop-in stores: partitions as tables, samples by key and index, their columns and tags."""
