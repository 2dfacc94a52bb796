"""The run of a log directory on the server: its key, which makes a resumed program go on in the same run, and its end.

The key is in ``run.json``. A directory whose configuration changed before its first checkpoint starts a new run.
"""

import asyncio
import json
import secrets
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from traceback import format_exception_only
from typing import Any

from lorimer import TrainingClient
from lorimer.client.errors import TinkerError
from lorimer.client.runs import RunOptions
from lorimer.cookbook.logs import CONFIG_FILE, write_atomically
from lorimer.types.runs import EndStatus

RUN_FILE = "run.json"
MAX_ERROR_CHARS = 2000
LAST_WORD_SECONDS = 5.0


def run_options(
    directory: Path | str,
    config: Mapping[str, Any],
    *,
    num_steps: int,
    resume_step: int,
    name: str | None = None,
    tags: Sequence[str] = (),
) -> RunOptions:
    """Return what the run of a directory tells the server; call it before ``open_log`` writes the configuration."""
    directory = Path(directory)
    plain = json.loads(json.dumps(dict(config), default=str))
    return {
        "run_key": _key_of(directory, plain, resume_step),
        "name": name or directory.resolve().name or None,
        "tags": list(tags),
        "config": plain,
        "num_steps": num_steps,
        "first_step": resume_step,
    }


def _key_of(directory: Path, config: dict[str, Any], resume_step: int) -> str:
    path, known = directory / RUN_FILE, directory / CONFIG_FILE
    is_same = resume_step > 0 or (known.exists() and json.loads(known.read_text("utf-8")) == config)
    if is_same and path.exists():
        return str(json.loads(path.read_text("utf-8"))["run_key"])
    directory.mkdir(parents=True, exist_ok=True)
    key = secrets.token_hex(16)
    write_atomically(path, json.dumps({"run_key": key}) + "\n")
    return key


@asynccontextmanager
async def reported_end(client: TrainingClient) -> AsyncIterator[None]:
    """Tell the server how the run ended: finished, failed with the error, or interrupted."""
    try:
        yield
    except Exception as error:
        await _finish(client, "failed", "".join(format_exception_only(error)).strip()[:MAX_ERROR_CHARS])
        raise
    except BaseException:
        await _finish(client, "interrupted", None)
        raise
    await _finish(client, "finished", None)


async def _finish(client: TrainingClient, status: EndStatus, error: str | None) -> None:
    """Report the end. A server that cannot be reached, or does not track runs, must not hide how the loop ended."""
    with suppress(TinkerError, TimeoutError):
        await asyncio.wait_for(client.finish_run(status, error), LAST_WORD_SECONDS)
