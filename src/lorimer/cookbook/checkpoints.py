"""Checkpoints of a run, logged in its directory so that the same command goes on after an interruption.

``checkpoints.jsonl`` gets a line when a checkpoint is complete on the server, and another when it was deleted there. A
line is on disk before anything relies on it. Weights stay on the server; here are only their paths.
"""

import json
import os
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import lorimer
from lorimer import RestClient, ServiceClient, TrainingClient, types
from lorimer.client.runs import RunOptions
from lorimer.cookbook.progress import say
from lorimer.errors import CheckpointError, InvalidInput

FILE_NAME = "checkpoints.jsonl"

Method = Literal["lora", "full"]
"""What a run trains: an adapter, or the weights of the model itself."""


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    step: int
    """How many steps are done: the next step of the loop has this number."""
    state_path: str
    """Weights and optimiser, to go on training."""
    sampler_path: str
    """Weights to sample from."""
    extra: dict[str, Any] = field(default_factory=dict)
    """What else the loop needs to go on, as JSON."""


class Checkpoints:
    """The checkpoints of a directory; the last ``keep`` stay on the server, or all with ``None``."""

    def __init__(self, directory: Path | str, keep: int | None = None) -> None:
        if keep is not None and keep < 1:
            raise ValueError(f"keep is {keep}; 1 or more, or None for all, is accepted")
        self.path = Path(directory) / FILE_NAME
        self.keep = keep
        self.on_saved: Callable[[RestClient, Checkpoint], Awaitable[None]] | None = None
        """Called when the server has a checkpoint, before older ones are deleted."""

    def all(self) -> list[Checkpoint]:
        """Those that are on the server, oldest first."""
        found: dict[int, Checkpoint] = {}
        for line in read_jsonl(self.path):
            if "deleted_step" in line:
                found.pop(line["deleted_step"], None)
            else:
                found[line["step"]] = Checkpoint(**line)
        return sorted(found.values(), key=lambda checkpoint: checkpoint.step)

    def last(self) -> Checkpoint | None:
        return next(reversed(self.all()), None)

    async def save_async(
        self, training_client: TrainingClient, step: int, extra: dict[str, Any] | None = None
    ) -> Checkpoint:
        """Save the weights as they are after ``step`` steps, and log it when the server has them."""
        return await self.begin_save(training_client, step, extra)()

    def begin_save(
        self, training_client: TrainingClient, step: int, extra: dict[str, Any] | None = None
    ) -> Callable[[], Awaitable[Checkpoint]]:
        """What is saved is settled now, and the loop may submit its next step; what is returned waits and logs it."""
        last = self.last()
        if last is not None and last.step == step:
            return partial(_value, last)
        name = f"{step:06d}"
        state = training_client.save_state(name, overwrite=True)
        sampler = training_client.save_weights_for_sampler(name)

        async def finish() -> Checkpoint:
            """The log gets its line when this runs: after everything else that the loop has stored of the step."""
            paths = (await state).path, (await sampler).path
            checkpoint = Checkpoint(step=step, state_path=paths[0], sampler_path=paths[1], extra=extra or {})
            append_jsonl(self.path, asdict(checkpoint))
            rest = RestClient(training_client.holder.connection)
            if self.on_saved is not None:
                await self.on_saved(rest, checkpoint)
            await self._delete_old(rest)
            return checkpoint

        return finish

    async def _delete_old(self, rest: RestClient) -> None:
        for old in self.all()[: -self.keep] if self.keep else []:
            for path in (old.state_path, old.sampler_path):
                # It is gone already where an interruption came between its deletion and the log.
                with suppress(lorimer.NotFoundError):
                    await rest.delete_checkpoint_from_tinker_path_async(path)
            append_jsonl(self.path, {"deleted_step": old.step})


async def open_training_client(
    service: ServiceClient,
    *,
    base_model: str,
    rank: int,
    checkpoints: Checkpoints,
    method: Method = "lora",
    load_from: str | None = None,
    seed: int = 0,
    train_mlp: bool = True,
    train_attn: bool = True,
    train_unembed: bool = True,
    user_metadata: dict[str, str] | None = None,
    optimizer: str | None = None,
    run: RunOptions | None = None,
) -> tuple[TrainingClient, int]:
    """A client that goes on at the last checkpoint, optimiser included, and the number of its next step.

    Without a checkpoint it begins with the weights of ``load_from`` and a new optimiser, or with a new run of
    ``method``. What is resumed is printed, and a ``rank`` that the loaded weights do not have. ``run`` goes to the
    server.
    """
    told: RunOptions = run or {}
    last = checkpoints.last()
    if last is not None:
        try:
            client = await service.create_training_client_from_state_with_optimizer_async(
                last.state_path, user_metadata=user_metadata, **told
            )
        except lorimer.NotFoundError as error:
            raise CheckpointError(
                f"{checkpoints.path} names {last.state_path!r}, which the server does not have ({error}); "
                "train with the server that has it, or in another directory"
            ) from error
        say(f"resumed at step {last.step} from {last.state_path}")
        await tell_rank(client, rank, last.state_path)
        return client, last.step
    if load_from is not None:
        client = await service.create_training_client_from_state_async(
            load_from, user_metadata=user_metadata, optimizer=optimizer, **told
        )
        await tell_rank(client, rank, load_from)
        return client, 0
    if method == "full":
        client = await service.create_training_client_async(
            base_model,
            "full",
            train_mlp=train_mlp,
            train_attn=train_attn,
            train_unembed=train_unembed,
            train_embed=train_unembed,
            user_metadata=user_metadata,
            optimizer=optimizer,
            **told,
        )
        return client, 0
    client = await service.create_lora_training_client_async(
        base_model,
        rank=rank,
        seed=seed,
        train_mlp=train_mlp,
        train_attn=train_attn,
        train_unembed=train_unembed,
        user_metadata=user_metadata,
        optimizer=optimizer,
        **told,
    )
    return client, 0


async def delete_checkpoint(service: ServiceClient, checkpoint: Checkpoint) -> None:
    """Delete a checkpoint on the server; the log of its directory still says that the steps are done."""
    rest = service.create_rest_client()
    for path in (checkpoint.state_path, checkpoint.sampler_path):
        with suppress(lorimer.NotFoundError):
            await rest.delete_checkpoint_from_tinker_path_async(path)


async def unload_run(service: ServiceClient, checkpoint: Checkpoint) -> None:
    """Free the memory of the run that a checkpoint is of, whose training has ended."""
    connection = service.holder.connection
    request = types.UnloadModelRequest(model_id=model_id_of(checkpoint))
    await connection.run(connection.transport.call("POST", "/api/v1/unload_model", request)).result_async()


async def archive_run(service: ServiceClient, model_id: str) -> None:
    """Leave a run that only serves another one out of lists of runs, where the server keeps any."""
    with suppress(lorimer.NotFoundError):
        await service.create_rest_client().update_run_async(model_id, is_archived=True)


def model_id_of(checkpoint: Checkpoint) -> str:
    """Return the id of the training run that a checkpoint is of."""
    return checkpoint.state_path.removeprefix("tinker://").partition("/")[0]


def read_reference(path: Path) -> str:
    """The ``tinker://`` path in a file that a recipe wrote."""
    text = path.read_text("utf-8").strip()
    if not text.startswith("tinker://"):
        raise InvalidInput(f"{str(path)!r} holds {text[:80]!r}; the tinker:// path of saved weights is accepted")
    return text


async def tell_rank(client: TrainingClient, rank: int, path: str) -> None:
    """Print that a run goes on with the rank of the weights it was made from, where another one was asked for."""
    found = (await client.get_info_async()).lora_rank
    if found is not None and found != rank:
        say(f"rank {rank} is not used: {path} has rank {found}, and the run goes on with that")


def tell_complete(directory: Path | str, num_steps: int) -> None:
    """Print that there is nothing left to train."""
    say(
        f"{directory} holds a complete run of {num_steps} steps; nothing is trained. Another --log-dir begins a new run"
    )


async def _value(checkpoint: Checkpoint) -> Checkpoint:
    return checkpoint


# ── files of lines ────────────────────────────────────────────────────────────────────────────────────


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """The lines of a log; none if there is no file. A last line that was cut short by an interruption is no line."""
    if not path.exists():
        return []
    text = path.read_text("utf-8")
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines() if line]


def append_jsonl(path: Path, line: dict[str, Any]) -> None:
    """Add a line and wait until it is on disk. A line that was cut short before is dropped."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab+") as file:
        file.seek(0)
        file.truncate(file.read().rfind(b"\n") + 1)
        file.write(json.dumps(line).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())
