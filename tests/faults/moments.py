"""Named moments at which a process of the server is killed; ``crash/sitecustomize.py`` waits for them inside it."""

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

CRASH = Path(__file__).parent / "crash"


@dataclass(frozen=True)
class Moment:
    process: Literal["engine", "api"]
    event: str
    """Of Python's audit events; the process is killed just before what it announces takes place."""
    path: str
    """Pattern of what the event is about."""
    with_parent: bool = False
    """The process that started it is killed as well."""


class Fuse:
    """Arms moments in all processes that are started with ``variables``."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "fault.json"
        path = os.pathsep.join(filter(None, [str(CRASH), str(CRASH.parents[2] / "src"), os.environ.get("PYTHONPATH")]))
        self.variables = {"FAULT_FILE": str(self._file), "PYTHONPATH": path}

    def arm(self, moment: Moment) -> None:
        new = self._file.with_suffix(".new")
        new.write_text(json.dumps(asdict(moment)), "utf-8")
        new.rename(self._file)

    @property
    def has_blown(self) -> bool:
        return not self._file.exists()

    def disarm(self) -> None:
        self._file.unlink(missing_ok=True)


_SNAPSHOT, _WEIGHTS = r"/snapshots/[0-9a-f]{32}", r"/weights/[0-9a-f]{32}"

SNAPSHOTS = {
    "snapshot-begun": Moment("engine", "os.mkdir", _SNAPSHOT),
    "snapshot-half-written": Moment("engine", "open", rf"{_SNAPSHOT}\.tmp-\w+/lorimer\.json$"),
    "snapshot-whole-but-unnamed": Moment("engine", "os.rename", _SNAPSHOT),
    "snapshot-named-but-not-on-record": Moment("engine", "open", r"/snapshots$", with_parent=True),
    "snapshot-on-record-and-the-old-one-not-gone": Moment("api", "shutil.rmtree", _SNAPSHOT),
}
FULL_SNAPSHOTS = {
    "shard-begun": Moment("engine", "open", rf"{_SNAPSHOT}\.tmp-\w+/training_state-exp_avg-mlp"),
}
SAVES_AND_LOADS = {
    "save-begun": Moment("engine", "os.mkdir", _WEIGHTS),
    "save-half-written": Moment("engine", "open", rf"{_WEIGHTS}\.tmp-\w+/lorimer\.json$"),
    "save-whole-but-unnamed": Moment("engine", "os.rename", _WEIGHTS, with_parent=True),
    "save-named-but-not-on-record": Moment("engine", "open", r"/weights$", with_parent=True),
    "load-begun": Moment("engine", "open", rf"{_WEIGHTS}/lorimer\.json$"),
    "loaded-but-not-secured": Moment("engine", "os.rename", _SNAPSHOT, with_parent=True),
}
STARTS = {
    "start-before-the-sweep": Moment("api", "os.listdir", r"/snapshots$"),
    "restoring": Moment("engine", "open", rf"{_SNAPSHOT}/lorimer\.json$"),
}
