"""Full runs on disk: a Hugging Face directory, and the state of training beside it.

    config.json, model*.safetensors   the model as transformers writes it, float32, in shards
    tokenizer.json and the like       copies of the base model's
    training_state-*.safetensors      the optimiser's tensors and the accumulated gradient, in shards
    lorimer.json                      format version, run configuration, step, size and SHA-256 of the other files

A directory appears whole or not at all. A run goes on from it bit for bit; transformers, vLLM and the like load it.
Snapshots (``full/snapshots.py``), which only engines read, are loaded here too.
"""

import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import GenerationConfig

from lorimer.engine.directories import (
    FORMAT,
    File,
    Manifest,
    describe_files,
    load_tensors,
    new_directory,
    read_manifest,
    verify,
    write_manifest,
)
from lorimer.engine.full.full_run import FullRun, Tensors, bytes_of
from lorimer.engine.messages import FullConfig, OptimizerConfig
from lorimer.engine.model.base_model import BaseModel
from lorimer.engine.model.masters import MASTER_DTYPE
from lorimer.engine.sharding import local_part
from lorimer.engine.training.optim import check_finite, check_state
from lorimer.engine.training.optimizers import State
from lorimer.errors import CheckpointError
from lorimer.models.sources import COMPANION_FILES

SHARD_BYTES = 1 << 30
STATE = "training_state"


class RunManifest(Manifest, frozen=True, forbid_unknown_fields=True, kw_only=True):
    format: int
    base_model: str
    full: FullConfig
    optimizer: OptimizerConfig
    step: int
    frozen_sha256: str | msgspec.UnsetType = msgspec.UNSET
    """Of a snapshot: the digest of the parameters that are not trained, which it does not hold."""
    files: dict[str, File]
    checksum: str = ""
    """SHA-256 of this manifest with an empty checksum."""

    @property
    def state_files(self) -> list[str]:
        return sorted(name for name in self.files if name.startswith(f"{STATE}-"))


def save(run: FullRun, directory: str, *, weights_only: bool) -> int:
    """Write the run into ``directory``, which is absent or empty, and return the bytes written.

    On failure nothing is left behind. Of several ranks all take part, and rank 0 writes, a shard at a time.
    """
    run.check_finite("saved")
    with first_writes(run, directory) as temporary:
        averaged = run.averaged
        if run.shards.is_alone:
            with run.model.with_weights(run.model.masters.tensors() | (averaged or {})):
                _write_model(run.model, temporary, None)
        else:
            _write_shared_model(run, temporary, averaged or {})
        if not weights_only:
            state = run.state(with_weights=averaged is not None)
            parts = list(
                split_shards({key: run.division.describe(kind, name) for key, (kind, name, _) in state.items()})
            )
            for number, part in enumerate(parts, 1):
                tensors = collect(run, {key: state[key] for key in part})
                with run.shards.agreed():
                    if tensors is not None:
                        save_file(tensors, temporary / f"{STATE}-{number:05}-of-{len(parts):05}.safetensors")
        if run.shards.rank:
            return 0
        manifest = RunManifest(
            format=FORMAT,
            base_model=run.model.name,
            full=run.config,
            optimizer=run.optimizer,
            step=run.step,
            files=describe_files(temporary),
        )
        return write_manifest(temporary, manifest)


@contextmanager
def first_writes(run: FullRun, directory: str) -> Iterator[Path]:
    """Yield, at rank 0, a temporary directory that becomes ``directory``; the other ranks have nothing there."""
    with ExitStack() as stack:
        temporary = Path(directory)
        with run.shards.agreed():
            if run.shards.rank == 0:
                temporary = stack.enter_context(new_directory(directory))
        yield temporary


def collect(run: FullRun, state: Mapping[str, tuple[str, str, Tensor]]) -> Tensors | None:
    """Return whole tensors, by key, at rank 0; ``None`` at the others."""
    found = {key: run.division.collect(kind, name, part) for key, (kind, name, part) in state.items()}
    return None if run.shards.rank else {key: one.contiguous() for key, one in found.items() if one is not None}


def _write_model(model: BaseModel, directory: Path, weights: Tensors | None) -> None:
    """Write the model with ``weights``, or the model's own, as transformers does."""
    # transformers refuses to write settings of generation that it finds contradictory: the base's are copied instead.
    model.transformer.generation_config = GenerationConfig()
    model.transformer.save_pretrained(directory, state_dict=weights, max_shard_size=SHARD_BYTES)
    (directory / "generation_config.json").unlink(missing_ok=True)
    for pattern in COMPANION_FILES:
        for path in sorted(Path(model.directory).glob(pattern)):
            shutil.copyfile(path, directory / path.name)


def _write_shared_model(run: FullRun, directory: Path, averaged: Tensors) -> None:
    """Write the model that ranks share: rank 0 gathers one tensor at a time into a file, not into its memory."""
    shards, gathered = run.shards, directory / "gathered"
    weights: Tensors = {}
    with shards.agreed():
        if shards.rank == 0:
            gathered.mkdir()
    for number, (name, held) in enumerate(run.model.transformer.state_dict().items()):
        part = averaged.get(name, local_part(held))
        whole = shards.gather_rows(part, held.shape[0], to=0) if isinstance(held, DTensor) else part
        with shards.agreed():
            if shards.rank == 0 and whole is not None:
                weights[name] = _map_file(gathered / str(number), whole)
        del whole
    with shards.agreed():
        if shards.rank == 0:
            _write_model(run.model, directory, weights)
            weights.clear()
            shutil.rmtree(gathered)


def _map_file(path: Path, tensor: Tensor) -> Tensor:
    """Write a tensor; return it as a part of the file, which the system may drop from memory."""
    path.write_bytes(bytes_of(tensor))
    if not tensor.numel():
        return tensor
    return torch.from_file(str(path), shared=True, size=tensor.numel(), dtype=tensor.dtype).view(tensor.shape)


def split_shards(tensors: Tensors) -> Iterator[Tensors]:
    """Yield at least one part; each has at most ``SHARD_BYTES``, or a single tensor."""
    part: Tensors = {}
    size = 0
    for name, tensor in tensors.items():
        if part and size + tensor.nbytes > SHARD_BYTES:
            yield part
            part, size = {}, 0
        part[name] = tensor
        size += tensor.nbytes
    yield part


def load(run: FullRun, directory: str, *, optimizer: bool) -> None:
    """Replace the weights of ``run``; with ``optimizer`` its moments, gradient and step too, else they are cleared.

    If anything does not fit, the run stays as it was, at every rank.
    """
    with run.shards.agreed():
        manifest = _verified(Path(directory), is_read=run.shards.rank == 0)
        if manifest.full != run.config:
            raise CheckpointError(f"the saved run trains {manifest.full}, this run {run.config}")
    frozen_sha256 = None if manifest.frozen_sha256 is msgspec.UNSET else run.frozen_sha256
    with run.shards.agreed():
        weights, state, grads, step = _read(run, Path(directory), manifest, frozen_sha256, optimizer)
    for name, weight in run.weights.items():
        weight.copy_(weights[name])
    run.model.masters.refresh()
    run.moments, run.grads, run.step = state, grads, step


def _read(
    run: FullRun, directory: Path, manifest: RunManifest, frozen_sha256: str | None, optimizer: bool
) -> tuple[Tensors, State, Tensors | None, int]:
    """Return this rank's part of what a directory has: weights, moments, gradient and step."""
    state: State = {}
    grads, step, weights = None, 0, {}
    if frozen_sha256 is None:
        whole = load_weights(run.model, directory)
        frozen = {name: whole[name][run.shards.rows(len(whole[name]))] for name in run.frozen}
        if not all(torch.equal(frozen[name], tensor.cpu()) for name, tensor in run.frozen.items()):
            raise CheckpointError(
                f"the saved run began with another {run.model.name!r}: what it does not train differs"
            )
        weights = {name: run.division.cut("weight", name, whole[name]) for name in run.weights}
    elif manifest.frozen_sha256 != frozen_sha256:
        raise CheckpointError(f"the files of {run.model.name!r} have changed since the snapshot was written")
    if optimizer or not weights:
        state, step = _load_state(directory, manifest, run), manifest.step
        grads = state.pop("grad", None)
        weights |= state.pop("weight", {})
    if not optimizer:
        state, grads, step = {}, None, 0
    if not weights.keys() >= run.weights.keys():
        raise CheckpointError(f"{str(directory)!r} lacks weights that the run trains")
    return weights, state, grads, step


def load_published(model: BaseModel, directory: str) -> Tensors:
    """Return all weights of a saved run, on the model's device and in the dtype of its passes."""
    if _verified(Path(directory)).frozen_sha256 is not msgspec.UNSET:
        raise CheckpointError(f"{str(directory)!r} is a snapshot, which has no weights for sampling")
    weights = load_weights(model, Path(directory), model.device.dtype)
    return {name: tensor.to(model.device.handle) for name, tensor in weights.items()}


def load_weights(model: BaseModel, directory: Path, dtype: torch.dtype = MASTER_DTYPE) -> Tensors:
    """Return the weights in a Hugging Face directory by the names of the model's parameters; refuse others."""
    opens: Any = type(model.transformer)
    loaded, report = opens.from_pretrained(
        directory, dtype=dtype, local_files_only=True, use_safetensors=True, output_loading_info=True
    )
    found = {name: parameter.detach() for name, parameter in loaded.named_parameters()}
    wanted = {name: parameter.shape for name, parameter in model.transformer.named_parameters()}
    strange = {kind: sorted(map(str, report[kind])) for kind in ("missing_keys", "mismatched_keys") if report[kind]}
    if strange or {name: tensor.shape for name, tensor in found.items()} != wanted:
        raise CheckpointError(f"{str(directory)!r} does not hold exactly the weights of {model.name!r}: {strange}")
    for name, tensor in found.items():
        if not bool(tensor.isfinite().all()):
            raise CheckpointError(f"the saved weight {name!r} holds numbers that are not finite")
    return found


def replace_weights(model: BaseModel, weights: Tensors) -> None:
    """Copy other weights into the model, whose parameters stay the same objects."""
    for name, master in model.masters.tensors().items():
        master.copy_(weights[name][model.shards.rows(len(weights[name]))])
    model.masters.refresh()


def _verified(directory: Path, is_read: bool = True) -> RunManifest:
    """Return the manifest of a saved run; with ``is_read`` compare all files with it."""
    try:
        manifest = read_manifest(directory, RunManifest)
    except CheckpointError as error:
        raise CheckpointError(f"{str(directory)!r} is not a saved full run: {error}") from error
    if manifest is None:
        raise CheckpointError(f"{str(directory)!r} is not a saved full run: it has no lorimer.json")
    verify(directory, manifest.files, *(manifest.files if is_read else ()))
    return manifest


def _load_state(directory: Path, manifest: RunManifest, run: FullRun) -> State:
    """Load this rank's part of what was saved besides the weights, by kind and in the order of the weights."""
    if not manifest.state_files:
        raise CheckpointError(f"{str(directory)!r} holds weights only; load it without the optimizer state")
    if manifest.optimizer != run.optimizer:
        raise CheckpointError(f"the saved run uses {manifest.optimizer}, this run {run.optimizer}")
    found: State = {}
    described: State = {}
    device = run.model.device.handle
    for file in manifest.state_files:
        for full, tensor in load_tensors(directory / file).items():
            kind, _, name = full.partition("/")
            if name not in run.weights:
                raise CheckpointError(f"{file} holds {full!r}, which the run does not train")
            described.setdefault(kind, {})[name] = tensor.to("meta")
            # A copy: a loaded tensor is a part of the file in memory, which would stay as long as one of them.
            found.setdefault(kind, {})[name] = run.division.cut(kind, name, tensor).to(device, copy=True)
    for kind in ("grad", "weight"):
        if (whole := described.pop(kind, None)) is not None:
            _check_shapes(kind, whole, run)
    wholes = {name: torch.empty(shape, device="meta") for name, shape in run.division.shapes.items()}
    check_state(run.optimizer, wholes, described, manifest.step, run.groups)
    check_finite({kind: tensors for kind, tensors in found.items() if kind != "grad"})
    return {kind: {name: found[kind][name] for name in run.weights if name in found[kind]} for kind in sorted(found)}


def _check_shapes(kind: str, wholes: Tensors, run: FullRun) -> None:
    if {name: tensor.shape for name, tensor in wholes.items()} != run.division.shapes:
        raise CheckpointError(f"the saved state has {kind!r} of other names or shapes than the weights")
