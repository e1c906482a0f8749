"""Trainers and data loaders as consumers. Each module needs its framework; `packing` needs torch only."""
