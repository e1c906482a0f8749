"""The elements of columns: dtypes, numbers, plain values, and torch tensors."""
