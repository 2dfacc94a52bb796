"""Training runs of tests that are parts of tracked runs."""

from datetime import timedelta

from lorimer.store import runs, tracking
from lorimer.store.values import utc_now
from lorimer.types.runs import RunIdentity

SHAPE = {"rank": 8, "train_attn": True, "train_mlp": False, "train_unembed": True, "optimizer_type": "adamw"}
NOW = utc_now() - timedelta(days=1)
SOON = utc_now() + timedelta(days=1)


def make_part(c, session, number, identity=None, loaded_from=None, **values):
    """Create a session's training run of this number as a part of a run."""
    part = runs.create_run(
        c,
        session_id=session.session_id,
        user_id=session.user_id,
        project_id=None,
        model_seq_id=number,
        **SHAPE | {"base_model": "tiny", "seed": None, "user_metadata": {}} | values,
    )
    tracking.track(c, part, identity or RunIdentity(), loaded_from)
    return runs.get_run(c, part.model_id)
