"""The HTTP server: decode, authenticate, call the scheduler, encode, and map errors to status codes.

Runs in the API process.
"""
