"""The weight channel: versioned publication of model weights to generators."""
