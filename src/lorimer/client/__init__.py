"""The SDK: clients, futures, retries, heartbeats and transports. Runs on the user's machine."""
