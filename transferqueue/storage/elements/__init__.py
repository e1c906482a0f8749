"""What one element of a column may be."""
