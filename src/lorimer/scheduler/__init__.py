"""Orders and batches operations, keeps the journal, and delivers results to waiting clients.

Runs in the API process.
"""
