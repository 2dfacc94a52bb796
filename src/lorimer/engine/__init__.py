"""The model, its adapters, losses, optimisers, training and sampling, behind a message loop.

Runs in the engine process, one for each base model. Other processes use only ``messages`` and ``process``; these two
and ``config`` do not load torch, and this file imports nothing for the same reason.
"""
