"""Renderers, datasets, training loops, environments, evaluators, logging and resume. Runs on the user's machine."""
