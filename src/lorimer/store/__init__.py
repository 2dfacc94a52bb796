"""Durable facts: the database, blobs and checkpoints, migrations and retention. Runs in the API process."""
