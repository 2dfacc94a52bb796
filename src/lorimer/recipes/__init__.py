"""Training scripts a person can read in ten minutes. Run on the user's machine."""
