"""One accepted request on its way: what it is, where it stands, and the promise that those who wait for it hold."""

import asyncio
import time
from dataclasses import dataclass, field
from typing import Any, Literal

QueueState = Literal["active", "paused_capacity", "paused_rate_limit"]

TRAINING = frozenset({"forward", "forward_backward"})
"""Kinds that go through the model together, many runs in one batch; every other kind of a run is a barrier."""
REPLAYED = frozenset({"forward_backward", "optim_step", "load_weights"})
"""Kinds that change a run and are done again after a crash. A load ends with a snapshot; only if that is damaged is it
done again."""
BARRIER_TOKENS = 16
"""What an operation without tokens counts in the accounts of who was served how much."""
SUSPICIOUS_DEATHS = 2
"""What so many engines ended over is computed with nothing beside it, to find out whether it is the cause."""


@dataclass(frozen=True)
class Outcome:
    """How a request stands."""

    state: Literal["pending", "done", "failed", "gone"]
    queue_state: QueueState = "active"
    reason: str = ""
    result: bytes = b""
    result_format: Literal["json", "protobuf"] = "json"
    error: str = ""
    category: Literal["user", "server", "unknown"] = "unknown"


@dataclass(eq=False)
class Operation:
    request_id: str
    user_id: str
    session_id: str
    base_model: str
    lane: str
    """Within which numbers are ordered: the run, the sampling session, or a session's models or losses."""
    seq_id: int
    kind: str
    tokens: int = 0
    payload: bytes = b""
    """Until it has been sent; read from the journal when that must be repeated."""
    payload_sha256: str = ""
    """Of the payload as it was submitted, if it has been computed."""
    request: Any = None
    """The decoded payload, until it has been sent."""
    reads: str | None = None
    """The weights it loads, which must stay until then."""
    is_replay: bool = False
    """Finished before a crash: done again for the state it leaves, with nothing to answer."""
    deaths: int = 0
    """How many engines ended while they computed this, or failed at it by an error of their own."""
    is_accepted: bool = False
    """On record; until then it may still be refused, and is not computed."""
    started_at: float = 0.0
    """Wall clock, for the record."""
    received: float = field(default_factory=time.monotonic)
    outcome: "asyncio.Future[Outcome]" = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    size: int = field(init=False)
    """Bytes of the payload as it was submitted."""

    def __post_init__(self) -> None:
        self.size = len(self.payload)

    @property
    def is_training(self) -> bool:
        return self.kind in TRAINING

    @property
    def is_suspect(self) -> bool:
        return self.deaths >= SUSPICIOUS_DEATHS and not self.outcome.done()

    def settle(self, outcome: Outcome) -> None:
        """Tell those who wait; only the first time counts."""
        if not self.outcome.done():
            self.outcome.set_result(outcome)
