"""Conformance kits: checks that every generator, learner, stage, scorer, backing and store must pass, for adapters of
any engine."""
