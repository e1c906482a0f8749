"""Conformance kits: what generators, learners and stages must do, for adapters of any engine."""
