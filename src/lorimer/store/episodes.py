"""Episodes of programs outside: a run's sampler for them, their turns as sampled, their rewards, and their expiry.

The tokens of a turn are a blob. A row of `episode_runs` counts the episodes and bytes of its run, so that limits need
no scan. Everything is in the database: any API replica can serve the next turn.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from datetime import datetime
from typing import Any

import msgspec
import numpy as np
from sqlalchemy import Connection, delete, select, text, update

from lorimer.errors import Gone, InvalidInput, NotFound, QuotaExceeded
from lorimer.store import blobs, samplers
from lorimer.store.tables import episode_runs, episodes, insert, turns
from lorimer.store.values import new_id, record, record_or_none, storable, utc_now
from lorimer.types.episodes import CreateEpisodeRequest, EpisodeState, FinishEpisodeRequest, SetRunSamplerRequest

MAX_READ_BYTES = 16 * 2**20
"""A reading of turns stops when it has so many bytes of tokens."""
_DELETED_TOGETHER = 500


@dataclass(frozen=True)
class EpisodeLimits:
    max_episodes_per_run: int
    max_episode_bytes_per_run: int
    max_turns_per_episode: int


@dataclass(frozen=True)
class RunSampler:
    """What answers the episodes of a run that have no sampler of their own."""

    run_id: str
    sampler: str | None
    temperature: float | None
    max_tokens: int | None
    updated_at: datetime | None
    num_created: int
    num_episodes: int
    num_bytes: int


@dataclass(frozen=True)
class Episode:
    run_id: str
    episode_id: str
    number: int
    state: EpisodeState
    sampler: str | None
    temperature: float | None
    max_tokens: int | None
    seed: int | None
    reward: float | None
    reward_parts: dict[str, float]
    user_metadata: dict[str, Any]
    error: str | None
    num_begun: int
    """Requests that began; those that failed have no turn."""
    num_turns: int
    num_tokens: int
    num_bytes: int
    created_at: datetime
    last_used_at: datetime
    finished_at: datetime | None


class Tokens(msgspec.Struct, frozen=True):
    """What a blob holds: arrays in little-endian bytes."""

    prompt: bytes
    tokens: bytes
    logprobs: bytes


@dataclass(frozen=True, kw_only=True)
class Turn:
    number: int
    choice: int
    kind: str
    prompt_tokens: list[int]
    tokens: list[int]
    logprobs: list[float]
    stop_reason: str
    sampler: str
    temperature: float
    top_p: float
    top_k: int
    seed: int | None
    is_constrained: bool
    started_at: datetime
    finished_at: datetime

    def encode(self) -> bytes:
        """Return the arrays as they are stored; logprobs keep all their bits."""
        arrays = (
            np.array(self.prompt_tokens, "<i4").tobytes(),
            np.array(self.tokens, "<i4").tobytes(),
            np.array(self.logprobs, "<f8").tobytes(),
        )
        return msgspec.msgpack.encode(Tokens(*arrays))


_TURN_COLUMNS = [
    turns.c[field.name] for field in fields(Turn) if field.name not in ("prompt_tokens", "tokens", "logprobs")
]


# ── the run ───────────────────────────────────────────────────────────────────────────────────────────


def get_sampler(c: Connection, run_id: str) -> RunSampler | None:
    query = select(episode_runs).where(episode_runs.c.run_id == run_id)
    return record_or_none(RunSampler, c.execute(query).one_or_none())


def set_sampler(c: Connection, run_id: str, choice: SetRunSamplerRequest) -> RunSampler:
    """Choose what answers from the next request on."""
    _ensure_run(c, run_id)
    values = choice.model_dump() | {"updated_at": utc_now()}
    c.execute(update(episode_runs).where(episode_runs.c.run_id == run_id).values(values))
    found = get_sampler(c, run_id)
    assert found is not None
    return found


def _ensure_run(c: Connection, run_id: str) -> None:
    values = {"run_id": run_id, "num_created": 0, "num_episodes": 0, "num_bytes": 0}
    c.execute(insert(c, episode_runs).values(values).on_conflict_do_nothing())


def _count(c: Connection, run_id: str, num_episodes: int, num_bytes: int) -> None:
    chosen = update(episode_runs).where(episode_runs.c.run_id == run_id)
    c.execute(
        chosen.values(
            num_episodes=episode_runs.c.num_episodes + num_episodes, num_bytes=episode_runs.c.num_bytes + num_bytes
        )
    )


# ── one episode ───────────────────────────────────────────────────────────────────────────────────────


def _is(run_id: str, episode_id: str) -> Any:
    return (episodes.c.run_id == run_id) & (episodes.c.episode_id == episode_id)


def get(c: Connection, run_id: str, episode_id: str) -> Episode | None:
    return record_or_none(Episode, c.execute(select(episodes).where(_is(run_id, episode_id))).one_or_none())


def find(c: Connection, run_id: str, episode_id: str) -> tuple[Episode | None, RunSampler | None]:
    """Return an episode, if it was made already, and the sampler of its run, if it has one."""
    return get(c, run_id, episode_id), get_sampler(c, run_id)


def create(c: Connection, run_id: str, request: CreateEpisodeRequest, limits: EpisodeLimits) -> Episode:
    """Make an episode. Refuse an id that the run has already."""
    episode_id = request.episode_id or new_id()
    if not _make(c, run_id, episode_id, request.model_dump(exclude={"episode_id"}), limits):
        raise InvalidInput(f"the run has an episode {episode_id!r} already; a new id is accepted")
    return _require(c, run_id, episode_id)


def _make(c: Connection, run_id: str, episode_id: str, given: dict[str, Any], limits: EpisodeLimits) -> bool:
    """Insert an episode unless there is one. Return whether it was inserted."""
    if get(c, run_id, episode_id) is not None:
        return False
    _ensure_run(c, run_id)
    # The update locks the row of the run: two replicas that make the same episode do so one after the other.
    counted = update(episode_runs).where(episode_runs.c.run_id == run_id)
    counted = counted.values(
        num_created=episode_runs.c.num_created + 1, num_episodes=episode_runs.c.num_episodes + 1
    ).returning(episode_runs.c.num_created, episode_runs.c.num_episodes)
    number, num_episodes = c.execute(counted).one()
    if num_episodes > limits.max_episodes_per_run:
        raise QuotaExceeded(
            f"the run has {limits.max_episodes_per_run} episodes, and no more are accepted (max_episodes_per_run);"
            " delete some"
        )
    now = utc_now()
    values = {
        "run_id": run_id,
        "episode_id": episode_id,
        "number": number,
        "state": "open",
        "reward_parts": {},
        "user_metadata": {},
        "created_at": now,
        "last_used_at": now,
        **dict.fromkeys(("num_begun", "num_turns", "num_tokens", "num_bytes"), 0),
    }
    made = insert(c, episodes).values(values | given).on_conflict_do_nothing()
    if not c.execute(made).rowcount:
        _count(c, run_id, -1, 0)
        return False
    return True


def _require(c: Connection, run_id: str, episode_id: str) -> Episode:
    found = get(c, run_id, episode_id)
    if found is None:
        raise missing(run_id, episode_id)
    return found


def missing(run_id: str, episode_id: str) -> NotFound:
    return NotFound(f"run {run_id!r} has no episode {episode_id!r}")


def _require_open(episode: Episode) -> None:
    if episode.state != "open":
        raise Gone(f"episode {episode.episode_id!r} is {episode.state}; a request to another episode is accepted")


def begin_turn(c: Connection, run_id: str, episode_id: str, sampler: str, limits: EpisodeLimits) -> Episode:
    """Count a request of an episode, which is made if need be. Return the episode with the request's number.

    ``sampler`` is what will answer; a sampling session is marked as used, so that its weights are kept.
    """
    _make(c, run_id, episode_id, {}, limits)
    counted = update(episodes).where(_is(run_id, episode_id))
    c.execute(counted.values(num_begun=episodes.c.num_begun + 1, last_used_at=utc_now()))
    episode = _require(c, run_id, episode_id)
    _require_open(episode)
    if episode.num_begun > limits.max_turns_per_episode:
        raise QuotaExceeded(
            f"episode {episode_id!r} has had {limits.max_turns_per_episode} requests, and no more are accepted"
            " (max_turns_per_episode)"
        )
    run = get_sampler(c, run_id)
    if run is not None and run.num_bytes >= limits.max_episode_bytes_per_run:
        raise QuotaExceeded(
            f"the episodes of the run have {run.num_bytes} bytes; below {limits.max_episode_bytes_per_run} another turn"
            " is accepted (max_episode_bytes_per_run): delete some"
        )
    samplers.touch_samplers(c, {sampler: utc_now()})
    return episode


def record_turn(c: Connection, run_id: str, episode_id: str, turn: Turn) -> None:
    """Store a turn. Refuse one whose episode has ended meanwhile."""
    counted = update(episodes).where(_is(run_id, episode_id))
    data = turn.encode()
    c.execute(
        counted.values(
            num_turns=episodes.c.num_turns + 1,
            num_tokens=episodes.c.num_tokens + len(turn.tokens),
            num_bytes=episodes.c.num_bytes + len(data),
            last_used_at=turn.finished_at,
        )
    )
    _require_open(_require(c, run_id, episode_id))
    _count(c, run_id, 0, len(data))
    values = {column.name: getattr(turn, column.name) for column in _TURN_COLUMNS}
    turn_id = new_id()
    place = {"turn_id": turn_id, "run_id": run_id, "episode_id": episode_id, "num_bytes": len(data)}
    c.execute(turns.insert(), values | place)
    blobs.put(c, turn_id, "payload", data)


def finish(c: Connection, run_id: str, episode_id: str, request: FinishEpisodeRequest) -> Episode:
    """End an episode. The same request again changes nothing, and another one is refused."""
    locked = select(episodes).where(_is(run_id, episode_id)).with_for_update()
    known = record_or_none(Episode, c.execute(locked).one_or_none())
    if known is None:
        raise missing(run_id, episode_id)
    error = None if request.error is None else storable(request.error)
    if known.state in ("finished", "failed"):
        if (known.reward, known.error, known.reward_parts) == (request.reward, error, request.reward_parts):
            return known
        said = f"reward {known.reward!r}" if known.state == "finished" else f"error {known.error!r}"
        raise Gone(f"episode {episode_id!r} has ended already, with {said}")
    _require_open(known)
    values = {
        "state": "finished" if error is None else "failed",
        "reward": request.reward,
        "reward_parts": request.reward_parts,
        "user_metadata": known.user_metadata | request.user_metadata,
        "error": error,
        "finished_at": utc_now(),
    }
    c.execute(update(episodes).where(_is(run_id, episode_id)).values(values))
    return _require(c, run_id, episode_id)


# ── lists ─────────────────────────────────────────────────────────────────────────────────────────────


def list_episodes(
    c: Connection, run_id: str, *, after: int = 0, limit: int = 100, state: EpisodeState | None = None
) -> list[Episode]:
    """Return the episodes of a run with larger numbers than ``after``, in order."""
    query = select(episodes).where(episodes.c.run_id == run_id, episodes.c.number > after)
    if state is not None:
        query = query.where(episodes.c.state == state)
    return [record(Episode, row) for row in c.execute(query.order_by(episodes.c.number).limit(limit))]


def read_turns(
    c: Connection, run_id: str, episode_id: str, *, after: int = 0, limit: int = 100
) -> tuple[list[Turn], bool]:
    """Return the turns with larger numbers than ``after``, and whether more follow.

    Turns of one request are never separated, so there may be more than ``limit``.
    """
    chosen = (turns.c.run_id == run_id) & (turns.c.episode_id == episode_id) & (turns.c.number > after)
    query = select(turns.c.turn_id, turns.c.num_bytes, *_TURN_COLUMNS).where(chosen)
    taken: list[Any] = []
    num_bytes = 0
    for row in c.execute(query.order_by(turns.c.number, turns.c.choice)):
        is_new = not taken or row.number != taken[-1].number
        if is_new and taken and (len(taken) >= limit or num_bytes >= MAX_READ_BYTES):
            return list(_with_tokens(c, taken)), True
        taken.append(row)
        num_bytes += row.num_bytes
    return list(_with_tokens(c, taken)), False


def _with_tokens(c: Connection, rows: Sequence[Any]) -> Iterator[Turn]:
    blobs.expect(c, [row.turn_id for row in rows], "payload")
    for row in rows:
        data = blobs.get(c, row.turn_id, "payload")
        assert data is not None, "a turn and its tokens are deleted together"
        found = msgspec.msgpack.decode(data, type=Tokens)
        yield Turn(
            **{column.name: row._mapping[column.name] for column in _TURN_COLUMNS},
            prompt_tokens=np.frombuffer(found.prompt, "<i4").tolist(),
            tokens=np.frombuffer(found.tokens, "<i4").tolist(),
            logprobs=np.frombuffer(found.logprobs, "<f8").tolist(),
        )


# ── deletion ──────────────────────────────────────────────────────────────────────────────────────────


def remove(c: Connection, run_id: str, episode_id: str) -> None:
    """Delete an episode with its turns."""
    if not _remove(c, run_id, episode_id):
        raise missing(run_id, episode_id)


def _remove(c: Connection, run_id: str, episode_id: str) -> bool:
    """Return whether there was such an episode; another server may have deleted it just now."""
    chosen = delete(episodes).where(_is(run_id, episode_id)).returning(episodes.c.num_bytes)
    num_bytes = c.execute(chosen).scalar_one_or_none()
    if num_bytes is None:
        return False
    _count(c, run_id, -1, -num_bytes)
    _remove_turns(c, (turns.c.run_id == run_id) & (turns.c.episode_id == episode_id))
    return True


def remove_of_run(c: Connection, run_id: str) -> None:
    """Delete everything of a run; called when the run is deleted."""
    _remove_turns(c, turns.c.run_id == run_id)
    for table in (episodes, episode_runs):
        c.execute(delete(table).where(table.c.run_id == run_id))


def _remove_turns(c: Connection, chosen: Any) -> None:
    gone = list(c.execute(delete(turns).where(chosen).returning(turns.c.turn_id)).scalars())
    for begin in range(0, len(gone), _DELETED_TOGETHER):
        blobs.drop(c, gone[begin : begin + _DELETED_TOGETHER])


def expire(c: Connection, *, idle_before: datetime, finished_before: datetime) -> int:
    """End open episodes that are idle, and delete those that ended long ago. Return how many; 0 is all done."""
    idle = update(episodes).where(text("state = 'open'"), episodes.c.last_used_at < idle_before)
    num_idle = c.execute(idle.values(state="expired", finished_at=utc_now())).rowcount
    query = select(episodes.c.run_id, episodes.c.episode_id).where(episodes.c.finished_at < finished_before)
    old = c.execute(query.order_by(episodes.c.finished_at).limit(_DELETED_TOGETHER)).all()
    for row in old:
        _remove(c, row.run_id, row.episode_id)
    return num_idle + len(old)
