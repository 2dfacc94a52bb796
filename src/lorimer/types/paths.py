"""``tinker://`` paths and the names of checkpoints.

A path is ``tinker://<run>/<segment>/<name>``; the segment gives the kind of checkpoint. Names are database keys and
never become file system paths.
"""

import os
import re
from typing import Literal, Self
from urllib.parse import quote

from lorimer.errors import InvalidInput
from lorimer.types.base import Response

CheckpointType = Literal["training", "sampler", "external"]

SCHEME = "tinker://"
SEGMENTS: dict[CheckpointType, str] = {
    "training": "weights",
    "sampler": "sampler_weights",
    "external": "external_weights",
}
KINDS: dict[str, CheckpointType] = {segment: kind for kind, segment in SEGMENTS.items()}

DEFAULT_BASE_URL = "http://127.0.0.1:8000"

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


class ParsedCheckpointTinkerPath(Response):
    """The parts of a checkpoint's path."""

    tinker_path: str
    training_run_id: str
    checkpoint_type: CheckpointType
    checkpoint_id: str
    """Segment and name, such as ``weights/step-10``."""

    @property
    def name(self) -> str:
        return self.checkpoint_id.partition("/")[2]

    @classmethod
    def from_tinker_path(cls, tinker_path: str) -> Self:
        """Parse a path. Raise ``ValueError`` with the accepted form."""
        run, _, rest = tinker_path.removeprefix(SCHEME).partition("/")
        segment, _, name = rest.partition("/")
        if not tinker_path.startswith(SCHEME) or segment not in KINDS or not run or not name or "/" in name:
            raise ValueError(
                f"{tinker_path!r} is no checkpoint; accepted is tinker://<run>/<segment>/<name>"
                f" with one of the segments {', '.join(KINDS)}"
            )
        return cls(
            tinker_path=tinker_path,
            training_run_id=run,
            checkpoint_type=KINDS[segment],
            checkpoint_id=f"{segment}/{name}",
        )


def parse_path(path: str) -> ParsedCheckpointTinkerPath:
    """Parse a path from outside. Raise ``InvalidInput`` instead of ``ValueError``."""
    try:
        return ParsedCheckpointTinkerPath.from_tinker_path(path)
    except ValueError as error:
        raise InvalidInput(str(error)) from None


def checkpoint_path(run: str, kind: CheckpointType, name: str) -> str:
    return f"{SCHEME}{run}/{SEGMENTS[kind]}/{name}"


def check_name(name: str) -> str:
    """Validate the name of a checkpoint and return it."""
    if not _NAME.fullmatch(name) or ".." in name:
        raise InvalidInput(
            f"{name[:200]!r} cannot name a checkpoint; accepted are 1 to 128 of the characters A-Z a-z 0-9 . _ -,"
            " the first a letter or digit, and no two dots in a row"
        )
    return name


def console_url(*segments: str, **query: str) -> str:
    """Return the URL of a console page on the server that ``LORIMER_BASE_URL`` or ``TINKER_BASE_URL`` names."""
    base = os.environ.get("LORIMER_BASE_URL") or os.environ.get("TINKER_BASE_URL") or DEFAULT_BASE_URL
    path = "/".join(quote(segment, safe="") for segment in segments)
    pairs = "&".join(f"{key}={quote(value, safe='')}" for key, value in query.items())
    return f"{base.rstrip('/')}/console/{path}" + (f"?{pairs}" if pairs else "")
