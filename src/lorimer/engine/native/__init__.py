"""Functions for CPUs in C, compiled when an engine first needs them; torch computes the same where there are none."""
