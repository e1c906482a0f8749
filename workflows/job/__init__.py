"""A post-training job as a value and a file: your model, your data, your reward, streamed from rollout to optimizer."""
