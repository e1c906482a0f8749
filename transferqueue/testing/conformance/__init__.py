"""Conformance kits: checks that every generator, learner, stage, backing and store must pass, for adapters of any engine."""
