"""The state of one task: which rows wait, which are leased, and how the next are selected."""
