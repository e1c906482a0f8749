"""Advantages (numpy) and losses (torch) of a training job: pure functions of tensors, one file for each part."""
