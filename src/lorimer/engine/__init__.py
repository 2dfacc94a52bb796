"""The model, its adapters, losses, optimisers, training and sampling, behind a message loop.

Runs in the engine process, one for each base model. Other processes import ``messages``, ``translation``, ``process``
and ``config``, which do not load torch; this file imports nothing for the same reason.
"""
