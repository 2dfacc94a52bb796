"""Evaluation tasks, and what runs them on checkpoints: `lorimer eval`, and the evaluators of training loops."""
