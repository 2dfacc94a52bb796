"""Anthropic's Messages API over the chat of ``server/openai``.

``schemas.py`` is what clients send, ``messages.py`` goes both ways between it and chat; the paths are in
``routes/anthropic.py``.
"""
