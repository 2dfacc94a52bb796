"""Full runs on disk: a Hugging Face directory, and the state of training beside it.

    config.json, model*.safetensors   the model as transformers writes it, float32, in shards
    tokenizer.json and the like       copies of the base model's
    training_state-*.safetensors      the optimiser's tensors and the accumulated gradient, in shards
    lorimer.json                      format version, run configuration, step, size and SHA-256 of the other files

A directory appears whole or not at all. A run goes on from it bit for bit; transformers, vLLM and the like load it.
Snapshots (``full/snapshots.py``), which only engines read, are loaded here too.
"""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors.torch import save_file
from transformers import GenerationConfig

from lorimer.engine.adapters.adapters import are_finite
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
from lorimer.engine.full.full_run import FullRun, Tensors
from lorimer.engine.messages import FullConfig, OptimizerConfig
from lorimer.engine.model.base_model import BaseModel
from lorimer.engine.training.optim import check_state
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

    On failure nothing is left behind.
    """
    run.check_finite("saved")
    model = run.model
    with new_directory(directory) as temporary:
        averaged = run.averaged
        with model.with_weights(averaged or {}):
            _write_model(model, temporary)
        if not weights_only:
            parts = list(split_shards(state_tensors(run, with_weights=averaged is not None)))
            for number, part in enumerate(parts, 1):
                save_file(part, temporary / f"{STATE}-{number:05}-of-{len(parts):05}.safetensors")
        manifest = RunManifest(
            format=FORMAT,
            base_model=model.name,
            full=run.config,
            optimizer=run.optimizer,
            step=run.step,
            files=describe_files(temporary),
        )
        return write_manifest(temporary, manifest)


def _write_model(model: BaseModel, directory: Path) -> None:
    # transformers refuses to write settings of generation that it finds contradictory: the base's are copied instead.
    model.transformer.generation_config = GenerationConfig()
    model.transformer.save_pretrained(directory, max_shard_size=SHARD_BYTES)
    (directory / "generation_config.json").unlink(missing_ok=True)
    for pattern in COMPANION_FILES:
        for path in sorted(Path(model.directory).glob(pattern)):
            shutil.copyfile(path, directory / path.name)


def state_tensors(run: FullRun, *, with_weights: bool) -> Tensors:
    """Return what a run has besides its weights, or with these too, as ``kind/name``."""
    kinds = dict(run.moments)
    if run.grads is not None:
        kinds["grad"] = run.grads
    if with_weights:
        kinds["weight"] = run.weights
    return {
        f"{kind}/{name}": tensor.contiguous() for kind, tensors in kinds.items() for name, tensor in tensors.items()
    }


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

    If anything does not fit, the run stays as it was.
    """
    manifest = _verified(Path(directory))
    if manifest.full != run.config:
        raise CheckpointError(f"the saved run trains {manifest.full}, this run {run.config}")
    state: State = {}
    grads, step, weights = None, 0, {}
    if manifest.frozen_sha256 is msgspec.UNSET:
        weights = load_weights(run.model, Path(directory))
        if not all(torch.equal(weights[name], tensor.cpu()) for name, tensor in run.frozen.items()):
            raise CheckpointError(
                f"the saved run began with another {run.model.name!r}: what it does not train differs"
            )
    elif manifest.frozen_sha256 != run.frozen_sha256:
        raise CheckpointError(f"the files of {run.model.name!r} have changed since the snapshot was written")
    if optimizer or not weights:
        state, step = _load_state(Path(directory), manifest, run), manifest.step
        grads = _take(state, "grad", run)
        weights |= _take(state, "weight", run) or {}
        check_state(run.optimizer, run.weights, state, step, run.groups)
    if not optimizer:
        state, grads, step = {}, None, 0
    if not weights.keys() >= run.weights.keys():
        raise CheckpointError(f"{str(directory)!r} lacks weights that the run trains")
    replace_weights(run.model, weights)
    run.moments, run.grads, run.step = state, grads, step


def load_published(model: BaseModel, directory: str) -> Tensors:
    """Return all weights of a saved run, on the model's device."""
    if _verified(Path(directory)).frozen_sha256 is not msgspec.UNSET:
        raise CheckpointError(f"{str(directory)!r} is a snapshot, which has no weights for sampling")
    return {name: tensor.to(model.device.handle) for name, tensor in load_weights(model, Path(directory)).items()}


def load_weights(model: BaseModel, directory: Path) -> Tensors:
    """Return the weights in a Hugging Face directory by the names of the model's parameters; refuse others."""
    opens: Any = type(model.transformer)
    loaded, report = opens.from_pretrained(
        directory, dtype=torch.float32, local_files_only=True, use_safetensors=True, output_loading_info=True
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
    for name, parameter in model.transformer.named_parameters():
        if name in weights:
            parameter.data.copy_(weights[name])


def _verified(directory: Path) -> RunManifest:
    try:
        manifest = read_manifest(directory, RunManifest)
    except CheckpointError as error:
        raise CheckpointError(f"{str(directory)!r} is not a saved full run: {error}") from error
    if manifest is None:
        raise CheckpointError(f"{str(directory)!r} is not a saved full run: it has no lorimer.json")
    verify(directory, manifest.files, *manifest.files)
    return manifest


def _load_state(directory: Path, manifest: RunManifest, run: FullRun) -> State:
    """Load what was saved besides the weights, by kind and in the order of the weights."""
    if not manifest.state_files:
        raise CheckpointError(f"{str(directory)!r} holds weights only; load it without the optimizer state")
    if manifest.optimizer != run.optimizer:
        raise CheckpointError(f"the saved run uses {manifest.optimizer}, this run {run.optimizer}")
    found: State = {}
    device = run.model.device.handle
    for file in manifest.state_files:
        for full, tensor in load_tensors(directory / file).items():
            kind, _, name = full.partition("/")
            if name not in run.weights:
                raise CheckpointError(f"{file} holds {full!r}, which the run does not train")
            # A copy: a loaded tensor is a part of the file in memory, which would stay as long as one of them.
            found.setdefault(kind, {})[name] = tensor.to(device, copy=True)
    return {kind: {name: found[kind][name] for name in run.weights if name in found[kind]} for kind in sorted(found)}


def _take(state: State, kind: str, run: FullRun) -> Tensors | None:
    """Remove tensors that are shaped like the weights, if there are any."""
    found = state.pop(kind, None)
    if found is not None and _shapes(found) != _shapes(run.weights):
        raise CheckpointError(f"the saved state has {kind!r} of other names or shapes than the weights")
    if found is not None and kind == "weight" and not are_finite(list(found.values())):
        raise CheckpointError(f"the saved state holds numbers in {kind!r} that are not finite")
    return found


def _shapes(tensors: Tensors) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in tensors.items()}
