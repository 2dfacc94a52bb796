"""Runs on disk: a directory that PEFT reads as an adapter and from which a run goes on bit for bit.

    adapter_config.json         PEFT's configuration
    adapter_model.safetensors   the weights under PEFT's names
    training_state.safetensors  the optimiser's state and the accumulated gradient; absent if weights only
    lorimer.json                format version, run configuration, step, size and SHA-256 of the other files

Where the optimiser averages weights, the adapter is the average and the training state has those that are trained.
A directory appears whole or not at all. Directories that PEFT wrote, which have no ``lorimer.json``, are read too.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from lorimer.engine.adapters.adapters import Adapter, Pairs, are_finite, join_factors, name_factors
from lorimer.engine.adapters.lora import LoraTarget
from lorimer.engine.adapters.peft_format import from_peft, read_lora_config, to_peft
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
from lorimer.engine.messages import LoraConfig, OptimizerConfig
from lorimer.engine.training.optim import check_state
from lorimer.engine.training.optimizers import State
from lorimer.errors import CheckpointError

_SETTINGS, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_STATE = "training_state.safetensors"


class _Manifest(Manifest, frozen=True, forbid_unknown_fields=True, kw_only=True):
    format: int
    base_model: str
    lora: LoraConfig
    optimizer: OptimizerConfig
    step: int
    files: dict[str, File]
    checksum: str = ""
    """SHA-256 of this manifest with an empty checksum."""


def save(
    adapter: Adapter, targets: Sequence[LoraTarget], directory: str, *, base_model: str, weights_only: bool
) -> int:
    """Write the run into ``directory``, which is absent or empty, and return the bytes written.

    On failure nothing is left behind.
    """
    adapter.check_finite("saved")
    with new_directory(directory) as temporary:
        return _write_files(adapter, targets, temporary, base_model, weights_only)


def _write_files(
    adapter: Adapter, targets: Sequence[LoraTarget], directory: Path, base_model: str, weights_only: bool
) -> int:
    averaged = adapter.averaged
    weights = adapter.weights if averaged is None else averaged
    tensors, settings = to_peft(weights, targets, adapter.config, base_model)
    (directory / _SETTINGS).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    save_file(tensors, directory / _WEIGHTS, metadata={"format": "pt"})
    del tensors
    if not weights_only:
        save_file(_state_tensors(adapter, averaged is not None), directory / _STATE)
    manifest = _Manifest(
        format=FORMAT,
        base_model=base_model,
        lora=adapter.config,
        optimizer=adapter.optimizer,
        step=adapter.step,
        files=describe_files(directory),
    )
    return write_manifest(directory, manifest)


def _state_tensors(adapter: Adapter, is_averaged: bool) -> dict[str, Tensor]:
    kinds = dict(adapter.moments)
    if adapter.grads is not None:
        kinds["grad"] = name_factors(adapter.grads)
    if is_averaged:
        kinds["weight"] = name_factors(adapter.weights)
    return {
        f"{kind}/{name}": tensor.contiguous() for kind, tensors in kinds.items() for name, tensor in tensors.items()
    }


def read_config(directory: str) -> LoraConfig:
    """Read the rank and the trained groups of a saved adapter."""
    if (manifest := _read_manifest(Path(directory))) is not None:
        return manifest.lora
    with _open(Path(directory) / _WEIGHTS) as file:
        return read_lora_config(file.keys(), _read_settings(Path(directory)))


def load_weights(directory: str, targets: Sequence[LoraTarget], config: LoraConfig) -> Pairs:
    """Load a saved adapter's weights, float32 on the CPU; refuse tensors other than those ``config`` trains."""
    path = Path(directory)
    manifest = _read_manifest(path)
    if manifest is not None:
        _check_same_run(manifest.lora, config)
        verify(path, manifest.files, _SETTINGS, _WEIGHTS)
    return from_peft(load_tensors(path / _WEIGHTS), _read_settings(path), targets, config)


def load(adapter: Adapter, targets: Sequence[LoraTarget], directory: str, *, optimizer: bool) -> None:
    """Replace the weights of ``adapter``; with ``optimizer`` its moments, gradient and step too, else they are cleared.

    If anything does not fit, the adapter stays as it was.
    """
    weights = load_weights(directory, targets, adapter.config)
    state: State = {}
    grads, step = None, 0
    if optimizer:
        state, step = _load_state(directory, weights, adapter)
        grads = _take_pairs(state, "grad", weights)
        weights = _take_pairs(state, "weight", weights) or weights
        check_state(adapter.optimizer, name_factors(weights), state, step, adapter.groups)
    on = adapter.device
    adapter.moments = {kind: {name: one.to(on) for name, one in tensors.items()} for kind, tensors in state.items()}
    adapter.weights, adapter.grads, adapter.step = _to(weights, on), None if grads is None else _to(grads, on), step
    adapter.weights_changed()


def _load_state(directory: str, weights: Pairs, adapter: Adapter) -> tuple[State, int]:
    """Load what was saved besides ``weights``, by kind and in the order of the weights, and the step counter."""
    path = Path(directory)
    manifest = _read_manifest(path)
    if manifest is None or _STATE not in manifest.files:
        raise CheckpointError(f"{directory!r} holds weights only; load it without the optimizer state")
    if manifest.optimizer != adapter.optimizer:
        raise CheckpointError(f"the saved run uses {manifest.optimizer}, this run {adapter.optimizer}")
    verify(path, manifest.files, _STATE)
    tensors = load_tensors(path / _STATE)
    state: State = {kind: {} for kind in sorted({full.partition("/")[0] for full in tensors})}
    for kind, found in state.items():
        for name in name_factors(weights):
            if (tensor := tensors.pop(f"{kind}/{name}", None)) is not None:
                found[name] = tensor.clone()  # no longer a view of the file
    if tensors:
        raise CheckpointError(f"{_STATE} holds {sorted(tensors)[0]!r}, which the run does not train")
    return state, manifest.step


def _take_pairs(state: State, kind: str, weights: Pairs) -> Pairs | None:
    """Remove tensors that are shaped like the weights, if there are any."""
    found = state.pop(kind, None)
    if found is None:
        return None
    if {name: one.shape for name, one in found.items()} != {k: v.shape for k, v in name_factors(weights).items()}:
        raise CheckpointError(f"{_STATE} has {kind!r} of other names or shapes than the weights")
    if kind == "weight" and not are_finite(list(found.values())):
        raise CheckpointError(f"{_STATE} holds numbers in {kind!r} that are not finite")
    return join_factors(found, weights)


def _to(pairs: Pairs, device: torch.device) -> Pairs:
    return {name: tuple(one.to(device) for one in pair) for name, pair in pairs.items()}


def _check_same_run(saved: LoraConfig, run: LoraConfig) -> None:
    for field in ("rank", "train_attn", "train_mlp", "train_unembed", "use_rslora", "use_dora"):
        ours, theirs = (getattr(config, field) or False for config in (run, saved))
        if ours != theirs:
            raise CheckpointError(f"the saved adapter has {field}={theirs!r}, the run has {field}={ours!r}")


def _read_manifest(directory: Path) -> _Manifest | None:
    return read_manifest(directory, _Manifest)


def _read_settings(directory: Path) -> dict[str, Any]:
    path = directory / _SETTINGS
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.MsgspecError) as error:
        raise CheckpointError(f"cannot read {str(path)!r}: {error}") from error


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"cannot read {str(path)!r}: {error}") from error
