"""Stages around an engine: prompts, generation, rewards and environments."""
