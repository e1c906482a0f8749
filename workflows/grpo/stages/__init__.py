"""The stages of the GRPO job."""
