"""Reinforcement learning: environments, rollouts, advantages, graders in processes of their own, training loops."""
