"""Training from a file of settings: reading and checking it, building the loop's configuration, estimating a run."""
