"""Programs that run inside a peer's environment, one for each peer, and know nothing of Lorimer.

Each opens a model and then answers calls, a line of JSON each (``lines.py``); ``bench/outsiders.py`` asks them.
"""
