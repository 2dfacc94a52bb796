"""The order in which operations run, how they are batched, the journal, and who is waiting. Runs in the API process."""
