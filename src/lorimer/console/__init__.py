"""The web page: runs, curves, checkpoints, playground and queue. Runs in the browser, over the public HTTP API only."""
