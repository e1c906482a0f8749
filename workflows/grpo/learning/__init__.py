"""Advantages, losses and the learner."""
