"""Full runs: training of the model's own weights, their copies for sampling, and their form on disk."""
