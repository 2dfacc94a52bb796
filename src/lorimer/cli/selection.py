"""Which checkpoints a command means, and doing the same to each of them."""

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import typer

from lorimer.cli.connection import collect
from lorimer.cli.failures import exit_code, sentence
from lorimer.cli.moments import aware
from lorimer.cli.output import Format, note, print_json, printable
from lorimer.cli.run import run_id_of
from lorimer.errors import LorimerError

if TYPE_CHECKING:
    from lorimer.client.rest import RestClient
    from lorimer.types import Checkpoint

CHECKPOINTS_PER_PAGE = 1000
AT_ONCE = 32
MAX_NAMED = 10
"""So many checkpoints are named in the question whether to delete them."""


def path_of(client: "RestClient", text: str) -> str:
    """Return the path of ``RUN@STEP``; anything else as it is."""
    if "@" not in text or text.startswith("tinker://"):
        return text
    import asyncio

    from lorimer.cookbook.evals.named_models import find_checkpoint

    run, _, place = text.rpartition("@")
    return asyncio.run(find_checkpoint(client, run, place)).tinker_path


class Kind(StrEnum):
    training = "training"
    sampler = "sampler"
    external = "external"


def checked(paths: list[str]) -> list[str]:
    """The paths, each once; ``InvalidInput`` if one is none."""
    from lorimer.types.paths import parse_path

    return list(dict.fromkeys(parse_path(path).tinker_path for path in paths))


def all_of(client: "RestClient", limit: int) -> tuple[list["Checkpoint"], int]:
    """The newest checkpoints of the caller, all if ``limit`` is 0, and how many there are."""

    def fetch(limit: int, offset: int) -> tuple[list["Checkpoint"], int]:
        answer = client.list_user_checkpoints(limit, offset).result()
        total = answer.cursor.total_count if answer.cursor else offset + len(answer.checkpoints)
        return answer.checkpoints, total

    return collect(fetch, limit, CHECKPOINTS_PER_PAGE)


def matching(
    client: "RestClient",
    run_id: str | None,
    kind: Kind | None,
    before: datetime | None = None,
    after: datetime | None = None,
) -> list["Checkpoint"]:
    """Those of a run, or all of the caller's, that are of this kind and age."""
    if run_id:
        found = client.list_checkpoints(run_id_of(run_id)).result().checkpoints
    else:
        found, _ = all_of(client, 0)
    return [
        one
        for one in found
        if (kind is None or one.checkpoint_type == kind.value)
        and (before is None or aware(one.time) < before)
        and (after is None or aware(one.time) > after)
    ]


def confirm(paths: list[str]) -> None:
    for path in paths[:MAX_NAMED]:
        note(f"  {path}")
    if len(paths) > MAX_NAMED:
        note(f"  and {len(paths) - MAX_NAMED} more")
    what = "this checkpoint" if len(paths) == 1 else f"these {len(paths)} checkpoints"
    typer.confirm(f"Delete {what}?", abort=True, err=True)


@dataclass
class Failures:
    """What failed of several things to do; the first decides the exit code."""

    errors: dict[str, Exception] = field(default_factory=dict)

    @contextmanager
    def noted(self, path: str) -> Iterator[None]:
        try:
            yield
        except BrokenPipeError:
            raise
        except (LorimerError, OSError) as error:
            self.errors[path] = error

    def plain(self) -> list[dict[str, str]]:
        return [{"tinker_path": path, "error": sentence(error)} for path, error in self.errors.items()]

    def end(self) -> None:
        """Say what failed, and leave the program if anything did."""
        for path, error in self.errors.items():
            note(f"lorimer: {path}: {sentence(error)}")
        if self.errors:
            raise typer.Exit(exit_code(next(iter(self.errors.values()))))


def change(paths: list[str], start: Callable[[str], "Future[Any]"], output: Format, word: str) -> None:
    """Do the same to each path, some concurrently; those that fail do not keep the others from it."""
    done, failed = [], Failures()
    for begin in range(0, len(paths), AT_ONCE):
        started = [(path, start(path)) for path in paths[begin : begin + AT_ONCE]]
        for path, future in started:
            with failed.noted(path):
                future.result()
                done.append(path)
    if output is Format.json:
        print_json({"done": done, "failed": failed.plain()})
    for path in done if output is Format.table else []:
        print(f"{printable(path)}: {word}")
    if not paths:
        note("no checkpoints match")
    failed.end()
