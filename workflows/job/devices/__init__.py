"""Which process of a job computes on which GPU, and the bytes that it takes there."""
