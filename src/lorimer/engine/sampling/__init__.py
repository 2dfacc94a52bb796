"""Sampling: continuous batching, token choice, and the key/value cache."""
