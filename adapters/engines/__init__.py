"""Inference engines as producers."""
