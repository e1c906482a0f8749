"""Jobs of other stacks, read as what they say and written as jobs of this package. Nothing that is read is executed."""
