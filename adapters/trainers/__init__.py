"""Trainers and data loaders as consumers."""
