"""Training: packed passes, losses, and optimisers."""
