"""Sampling by vLLM: a process that speaks the engine's messages for a vLLM server, which it starts and watches.

vLLM is installed in a Python environment of its own; nothing here imports it.
"""
