"""The web console: runs, metrics, checkpoints, playground and queue. Runs in the browser, on the public HTTP API."""
