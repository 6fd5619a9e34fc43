"""What a fine-tuning run needs besides the model: its data, its tasks and its schedule."""
