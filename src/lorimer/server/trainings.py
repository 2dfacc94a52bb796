"""Trainings that users start on the server: each is ``lorimer train`` in a child process, in a directory of its own.

    trainings/ID/  settings.yaml, data.jsonl, held_out.jsonl, log/, output.log, result.json

Recipes (``server/recipes.py``) are run by ``lorimer recipe run`` in the same way.

A training reads only rows that were sent with it, and acts with a key of its user that is revoked at its end. A server
that stops interrupts its trainings first; what a killed server leaves is interrupted by itself and marked at the next
start. Either can be resumed: the same command goes on at the last checkpoint.
"""

import asyncio
import json
import logging
import os
import secrets
import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
from sqlalchemy import Connection

from lorimer.errors import InvalidInput, NotFound, QuotaExceeded, TooLarge
from lorimer.server.child_commands import ChildCommand, own_address, read_tail
from lorimer.server.credentials import Credentials
from lorimer.server.errors import Refusal
from lorimer.server.recipes import PREFIX, check_options, recipe_command
from lorimer.server.settings import Settings
from lorimer.store import audit, tracking, trainings
from lorimer.store.database import Store
from lorimer.store.directory import DataDirectory
from lorimer.store.trainings import StoredTraining
from lorimer.store.users import User
from lorimer.types.paths import SCHEME
from lorimer.types.trainings import StartTrainingRequest

logger = logging.getLogger(__name__)

FOLDER = "trainings"
SETTINGS_FILE, DATA_FILE, HELD_OUT_FILE, LOG_FOLDER = "settings.yaml", "data.jsonl", "held_out.jsonl", "log"
STOP_SECONDS = 10.0
"""How long a training may take to end after it was interrupted."""
SAVE_EVERY = 20
"""Steps between checkpoints unless the settings say otherwise, so that there is something to resume."""
OWN_SETTINGS = ("data", "held_out_data", "log_dir", "base_url", "sinks", "grader_workers")
"""Settings that name files or services, or a number of processes: the server decides them."""
CODE_SETTINGS = ("grader", "graders", "eval_grader")
"""Settings that may name code."""
PATH_SETTINGS = ("load_from", "teacher_path", "kl_reference")
"""Settings that name weights, which are those of checkpoints."""


@dataclass
class _Running:
    user_id: str
    child: ChildCommand | None = None
    ended: "asyncio.Task[None] | None" = None
    asked: str = ""
    """The state that it gets because somebody ended it."""


class Trainings:
    """Starts, follows and ends the trainings of one server."""

    def __init__(self, settings: Settings, store: Store, credentials: Credentials, directory: DataDirectory) -> None:
        self._settings, self._store, self._credentials = settings, store, credentials
        self._folder = directory.path / FOLDER
        self._running: dict[str, _Running] = {}
        self._is_closing = False

    async def start(self) -> None:
        """Mark what a killed server left running as interrupted, and revoke its keys."""
        if self._settings.role != "all":
            return
        for left in await self._store.read(trainings.list_running):
            await self._end(left, "interrupted")

    def reason_against(self) -> str:
        """Return why no training can be started here; empty if one can."""
        if self._settings.role != "all":
            return (
                "an API replica of a cluster starts no trainings, as its replicas and workers share no directory;"
                " run `lorimer train` on another machine with this server as --base-url"
            )
        if self._settings.trainings == "off":
            return "trainings are off on this server (the setting trainings); run `lorimer train` against it"
        if self._settings.trainings == "auto" and not (self._settings.is_loopback and self._credentials.is_open):
            return (
                "this server has keys or can be reached by others, so it starts no trainings unless its operator sets"
                " trainings to on; run `lorimer train` against it"
            )
        return ""

    async def create(
        self, user: User, asked: StartTrainingRequest, url: str, kinds: Mapping[str, Any]
    ) -> StoredTraining:
        """Store a training and start it; ``kinds`` has the schemas of the recipes."""
        if reason := self.reason_against():
            raise Refusal(403, "trainings_off", reason)
        address = own_address(url)
        training_id = secrets.token_hex(16)
        if asked.kind.startswith(PREFIX):
            settings = checked_recipe(asked, kinds)
        else:
            settings = checked_settings(asked, may_name_code=self._settings.training_graders == "allowed")
            settings = {"save_every": SAVE_EVERY, "name": f"{asked.kind} {training_id[:6]}"} | settings
        sizes = [len((text or "").encode("utf-8", "replace")) for text in (asked.data, asked.held_out_data)]
        if sum(sizes) > self._settings.max_training_data_bytes:
            raise TooLarge(
                f"the rows have {sum(sizes)} bytes; at most {self._settings.max_training_data_bytes} are accepted"
                " (max_training_data_bytes)"
            )
        self._reserve(user.user_id, training_id)
        try:
            await asyncio.to_thread(write_files, self._folder / training_id, settings, asked)
            values = {
                "training_id": training_id,
                "user_id": user.user_id,
                "kind": asked.kind,
                "base_model": settings["base_model"],
                "settings": settings,
                "is_dry_run": asked.dry_run,
            }
            training: StoredTraining = await self._store.write(trainings.add, values)
        except BaseException:
            del self._running[training_id]
            await asyncio.to_thread(shutil.rmtree, self._folder / training_id, ignore_errors=True)
            raise
        await self._launch(training, user, address)
        return training

    async def resume(self, user: User, training: StoredTraining, url: str) -> StoredTraining:
        """Start a training again that has not finished; it goes on at its last checkpoint."""
        if reason := self.reason_against():
            raise Refusal(403, "trainings_off", reason)
        if training.state in ("running", "finished"):
            raise Refusal(409, f"training_{training.state}", f"the training is {training.state}; others are resumed")
        if not (self._folder / training.training_id / SETTINGS_FILE).is_file():
            raise NotFound("the directory of this training is gone; a backup does not have it: start it anew")
        address = own_address(url)
        self._reserve(user.user_id, training.training_id)
        try:
            resumed: StoredTraining = await self._store.write(trainings.restart, training.training_id)
        except BaseException:
            del self._running[training.training_id]
            raise
        await self._launch(resumed, user, address)
        return resumed

    def _reserve(self, user_id: str, training_id: str) -> None:
        """Take a place for a training. Raise ``QuotaExceeded`` if all are taken."""
        if self._is_closing:
            raise Refusal(503, "draining", "the server is shutting down; start the training when it is back")
        if training_id in self._running:
            raise Refusal(409, "training_running", "the training is running")
        own, limits = sum(one.user_id == user_id for one in self._running.values()), self._settings
        if own >= limits.max_trainings_per_user:
            raise QuotaExceeded(
                f"{own} trainings of yours are running, as many as may (max_trainings_per_user); wait, or stop one"
            )
        if len(self._running) >= limits.max_trainings:
            raise QuotaExceeded(
                f"{len(self._running)} trainings are running on this server, as many as may (max_trainings); wait"
            )
        self._running[training_id] = _Running(user_id)

    async def _launch(self, training: StoredTraining, user: User, address: str) -> None:
        """Start the process with a new key of the user, and follow it. Record a start that fails."""
        running, directory = self._running[training.training_id], self._folder / training.training_id
        try:
            secret = await self._make_key(training, user)
            arguments = await asyncio.to_thread(command_of, training, directory)
            memory = memory_limit(self._settings.training_memory_bytes)
            running.child = await ChildCommand.start(arguments, directory, address, secret, memory)
        except BaseException as error:
            del self._running[training.training_id]
            await self._end(training, "failed", f"it could not be started: {error}")
            raise
        running.ended = asyncio.create_task(self._follow(training.training_id, running))
        logger.info("training %s of user %s has started", training.training_id, user.user_id)

    async def _make_key(self, training: StoredTraining, user: User) -> str:
        if self._credentials.is_open:
            return ""  # the first key would end open mode
        key, secret = await self._credentials.create(user.name, f"training {training.training_id[:6]}")
        await self._store.write(trainings.set_key, training.training_id, key.key_id)
        await self._store.write(record_key, "key_created", key.user_id, key.key_id, training.training_id)
        return secret

    async def _follow(self, training_id: str, running: _Running) -> None:
        """Wait for the end of a training and record it."""
        child = running.child
        assert child is not None
        code = await child.wait()
        training = await self._store.read(trainings.get, training_id)
        assert training is not None, "a running training is not deleted"
        await self.find_run(training)
        del self._running[training_id]
        if code == 0:
            result = await asyncio.to_thread(read_result, self._folder / training_id)
            await self._end(training, "finished", result=result)
        else:
            error = None if running.asked else await asyncio.to_thread(child.error)
            await self._end(training, running.asked or "failed", error)
        logger.info("training %s has ended with code %d", training_id, code)

    async def _end(
        self, training: StoredTraining, state: str, error: str | None = None, result: dict[str, Any] | None = None
    ) -> None:
        current = await self._store.read(trainings.get, training.training_id) or training
        if current.key_id is not None and await self._credentials.revoke(current.key_id):
            await self._store.write(record_key, "key_revoked", training.user_id, current.key_id, training.training_id)
        await self._store.write(trainings.finish, training.training_id, state, error, result)

    async def stop(self, training: StoredTraining, state: str = "stopped") -> None:
        """End a training so that it can be resumed, and wait for its end."""
        running = self._running.get(training.training_id)
        if running is None or running.ended is None or running.child is None:
            return
        await self._interrupt(running, state)

    async def _interrupt(self, running: _Running, state: str) -> None:
        assert running.child is not None and running.ended is not None
        running.asked = running.asked or state
        running.child.interrupt()
        try:
            async with asyncio.timeout(STOP_SECONDS):
                await asyncio.shield(running.ended)
        except TimeoutError:
            running.child.kill()
            await asyncio.wait({running.ended})

    async def close(self) -> None:
        """Interrupt all trainings; the next server can resume them."""
        self._is_closing = True
        going = [one for one in self._running.values() if one.ended is not None]
        await asyncio.gather(*(self._interrupt(one, "interrupted") for one in going))

    async def delete(self, training: StoredTraining) -> None:
        """Delete a training with its files; its run and checkpoints stay."""
        if training.training_id in self._running:
            raise Refusal(409, "training_running", "the training is running; stop it before it is deleted")
        await self._store.write(trainings.delete_training, training.training_id)
        await asyncio.to_thread(shutil.rmtree, self._folder / training.training_id, ignore_errors=True)

    async def find_run(self, training: StoredTraining) -> str | None:
        """Return the run of a training, by the key that its loop has written to its log directory.

        A recipe may have several, one in each stage; it is the newest until the recipe ends.
        """
        is_final = training.run_id is not None and not (
            training.kind.startswith(PREFIX) and training.state == "running"
        )
        if is_final or training.is_dry_run:
            return training.run_id
        key = await asyncio.to_thread(newest_run_key, self._folder / training.training_id / LOG_FOLDER)
        if key is None:
            return training.run_id
        run_id: str | None = await self._store.read(tracking.run_with_key, training.user_id, key)
        if run_id not in (None, training.run_id):
            await self._store.write(trainings.set_run, training.training_id, run_id)
        return run_id or training.run_id  # of the last stage, until the run of a new one is created

    async def output(self, training: StoredTraining) -> str:
        return await asyncio.to_thread(read_tail, self._folder / training.training_id / ChildCommand.OUTPUT)


def record_key(c: Connection, event: str, user_id: str, key_id: int, training_id: str) -> None:
    audit.record(c, user_id=user_id, event=event, details={"key_id": key_id, "training_id": training_id})


def checked_settings(asked: StartTrainingRequest, *, may_name_code: bool) -> dict[str, Any]:
    """Return the settings of a training. Refuse those by which it would read files or run code of the server."""
    settings = dict(asked.settings)
    for name in OWN_SETTINGS:
        if name in settings:
            more = "; send the rows in the field of that name" if name in ("data", "held_out_data") else ""
            raise InvalidInput(f"settings has {name}, which the server decides{more}")
    if not may_name_code:
        _refuse_code(settings)
    for name in PATH_SETTINGS:
        if settings.get(name) is not None and not str(settings[name]).startswith(SCHEME):
            raise InvalidInput(f"settings has {name} {settings[name]!r:.200}; a {SCHEME} path is accepted")
    tasks = settings.get("eval_tasks", ())
    for task in tasks.split(",") if isinstance(tasks, str) else tasks:
        if "=" in str(task):
            raise InvalidInput(f"settings has the task {task!r:.200}; here tasks without a file are accepted")
    if not isinstance(settings.get("base_model"), str):
        raise InvalidInput("settings has no base_model; the name of a model that is served here is needed")
    if asked.data is None and (asked.kind != "rl" or asked.held_out_data is not None):
        raise InvalidInput(f"data is missing; a training of the kind {asked.kind} needs rows, as the text of JSONL")
    return settings


def checked_recipe(asked: StartTrainingRequest, kinds: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a recipe. Refuse those that it does not offer to users."""
    check_options(asked.kind, asked.settings, kinds)
    if asked.dry_run or asked.held_out_data is not None:
        raise InvalidInput(f"{'dry_run' if asked.dry_run else 'held_out_data'} is set, which recipes do not have")
    rows = kinds[asked.kind]["x-rows"]
    if (rows == "none" and asked.data is not None) or (rows == "needed" and asked.data is None):
        raise InvalidInput(f"data is {'missing' if asked.data is None else 'set'}; {asked.kind} takes rows: {rows}")
    if not isinstance(asked.settings.get("base_model"), str):
        raise InvalidInput("settings has no base_model; the name of a model that is served here is needed")
    return dict(asked.settings)


def command_of(training: StoredTraining, directory: Path) -> list[str]:
    """Return the command of ``lorimer`` that runs a training in its directory."""
    if training.kind.startswith(PREFIX):
        rows = Path(DATA_FILE) if (directory / DATA_FILE).is_file() else None
        log_dir = Path(LOG_FOLDER) / training.kind.removeprefix(PREFIX)  # its last part is the name of the run
        return recipe_command(training.kind, training.settings, log_dir, rows)
    arguments = ["train", training.kind, "--config", SETTINGS_FILE, "-f", "json"]
    return [*arguments, "--dry-run"] if training.is_dry_run else arguments


def memory_limit(setting: int) -> int:
    """Return the bytes that a process may have; 0 for no limit."""
    if setting:
        return max(setting, 0)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def newest_run_key(folder: Path) -> str | None:
    """Return the key of the run that began last in a log directory or those below it; none before there is one."""
    try:
        paths = sorted(folder.rglob("run.json"), key=lambda path: path.stat().st_mtime)
        return str(json.loads(paths[-1].read_text("utf-8"))["run_key"]) if paths else None
    except (OSError, ValueError, KeyError):
        return None


def _refuse_code(settings: Mapping[str, Any]) -> None:
    for name in CODE_SETTINGS:
        value = settings.get(name)
        if value is None or (name == "eval_grader" and not str(value).startswith("python:")):
            continue
        if name == "graders" and value == "processes":
            continue
        raise InvalidInput(
            f"settings has {name}, by which a training runs code as the user of the server; its operator allows that"
            " with training_graders=allowed"
        )


def write_files(directory: Path, settings: Mapping[str, Any], asked: StartTrainingRequest) -> None:
    """Make the directory of a training, only for the server's user."""
    directory.parent.mkdir(mode=0o700, exist_ok=True)
    directory.mkdir(mode=0o700)
    written = dict(settings) | {"log_dir": LOG_FOLDER}
    for name, file, text in (
        ("data", DATA_FILE, asked.data),
        ("held_out_data", HELD_OUT_FILE, asked.held_out_data),
    ):
        if text is not None:
            (directory / file).write_bytes(text.encode("utf-8", "replace"))
            written[name] = file
    (directory / SETTINGS_FILE).write_bytes(orjson.dumps(written, option=orjson.OPT_INDENT_2) + b"\n")  # JSON is YAML


def read_result(directory: Path) -> dict[str, Any] | None:
    with suppress(OSError, ValueError):
        found = orjson.loads((directory / ChildCommand.RESULT).read_bytes())
        return found if isinstance(found, dict) else None
    return None
