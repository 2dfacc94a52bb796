"""Enforces the storage quota of checkpoints and rollouts.

A quota belongs to a user, not to a key. A user without their own quota has the one in the server's settings; 0 means no
limit. Every unexpired checkpoint counts with its size, as in usage reports, and every rollout with what it takes.
"""

from sqlalchemy import Connection

from lorimer.errors import QuotaExceeded
from lorimer.store import checkpoints, rollouts, users
from lorimer.store.checkpoints import CheckpointKind


def stored_bytes(c: Connection, user_id: str) -> int:
    return sum(item.size_bytes for item in checkpoints.storage_usage(c, user_id)) + rollouts.bytes_of_user(c, user_id)


def check_save(
    c: Connection, user_id: str, model_id: str, kind: CheckpointKind, name: str, overwrite: bool, default: int
) -> None:
    """Refuse a save before computing it. Estimate its size by the newest checkpoint of its run and kind."""
    newest = checkpoints.last_of_run(c, model_id, kind)
    check_room(c, user_id, newest.size_bytes if newest else 1, default, (model_id, kind, name) if overwrite else None)


def check_room(
    c: Connection,
    user_id: str,
    num_bytes: int,
    default: int,
    replaced: tuple[str, CheckpointKind, str] | None = None,
) -> None:
    """Refuse a checkpoint that exceeds the quota. ``replaced`` identifies a checkpoint that it overwrites."""
    allowed = _allowed(c, user_id, default)
    if not allowed:
        return
    used = stored_bytes(c, user_id)
    old = checkpoints.find(c, *replaced) if replaced else None
    if used - (old.size_bytes if old else 0) + num_bytes > allowed:
        raise QuotaExceeded(
            f"the quota max_stored_bytes allows you {allowed} bytes of checkpoints and rollouts; {used} bytes are used,"
            f" and this one takes {num_bytes if num_bytes > 1 else 'some'} more: delete checkpoints, give them a"
            " lifetime, or ask the operator for more"
        )


def check_rollouts(c: Connection, user_id: str, num_bytes: int, default: int) -> None:
    """Refuse rollouts that exceed the quota."""
    allowed = _allowed(c, user_id, default)
    if allowed and (used := stored_bytes(c, user_id)) + num_bytes > allowed:
        raise QuotaExceeded(
            f"the quota max_stored_bytes allows you {allowed} bytes of checkpoints and rollouts; {used} bytes are used,"
            f" and these rollouts take {num_bytes}: delete checkpoints or runs, or log fewer rollouts"
        )


def _allowed(c: Connection, user_id: str, default: int) -> int:
    user = users.get_user(c, user_id)
    return default if user is None or user.max_stored_bytes is None else user.max_stored_bytes
