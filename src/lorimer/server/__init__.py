"""HTTP: decode, authorise, hand on, encode, and map errors to status codes. Runs in the API process."""
