"""The machine and the server's processes over time: CPU, memory, GPUs, disk, queues and throughput."""

from lorimer.types.base import Response


class SystemSeries(Response):
    """What one process measured of one thing. Queues and tokens are totals of all users."""

    source: str
    """The process: its machine, and in a cluster its role and the beginning of its id."""
    kind: str
    """cpu and gpu in percent (of all cores), memory, gpu_memory and disk in bytes, queue in unfinished requests, tokens
    per second."""
    name: str
    """What was measured: machine, server, the engine of a replica, the number of a GPU, a kind of request, ..."""
    points: list[tuple[int, float, float]]
    """``(unix seconds, mean, maximum)`` of each period, oldest first."""


class SystemResponse(Response):
    period_seconds: float
    """How far points are apart."""
    now: int
    """The server's clock."""
    series: list[SystemSeries]
