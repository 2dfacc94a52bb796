"""Environments of other projects as environments of ``cookbook/rl``; each loads its project when it is asked for."""
