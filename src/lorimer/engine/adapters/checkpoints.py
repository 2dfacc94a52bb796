"""Runs on disk: a directory that PEFT reads as an adapter and from which a run goes on bit for bit.

    adapter_config.json         PEFT's configuration
    adapter_model.safetensors   the weights under PEFT's names
    training_state.safetensors  the optimiser's moments and the accumulated gradient; absent if weights only
    lorimer.json                format version, run configuration, step, size and SHA-256 of the other files

A directory appears whole or not at all. Directories that PEFT wrote, which have no ``lorimer.json``, are read too.
"""

import hashlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from lorimer.engine.adapters.adapters import Adapter, Pairs, are_finite, flatten
from lorimer.engine.adapters.lora import LoraTarget, is_trained, shapes
from lorimer.engine.adapters.peft_format import from_peft, read_lora_config, to_peft
from lorimer.engine.messages import LoraConfig, OptimizerConfig
from lorimer.errors import CheckpointError

FORMAT = 1

_SETTINGS, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_STATE, _MANIFEST = "training_state.safetensors", "lorimer.json"


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    size: int
    sha256: str


class _Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    format: int
    base_model: str
    lora: LoraConfig
    optimizer: OptimizerConfig
    step: int
    files: dict[str, _File]
    checksum: str = ""
    """SHA-256 of this manifest with an empty checksum."""

    def digest(self) -> str:
        return hashlib.sha256(msgspec.json.encode(msgspec.structs.replace(self, checksum=""))).hexdigest()


def save(
    adapter: Adapter, targets: Sequence[LoraTarget], directory: str, *, base_model: str, weights_only: bool
) -> int:
    """Write the run into ``directory``, which is absent or empty, and return the bytes written.

    On failure nothing is left behind.
    """
    adapter.check_finite("saved")
    target = Path(directory)
    temporary = target.with_name(f"{target.name}.tmp-{secrets.token_hex(4)}")
    try:
        if target.exists() and not (target.is_dir() and not any(target.iterdir())):
            raise CheckpointError(f"{directory!r} already exists and is not an empty directory")
        temporary.mkdir(parents=True)
        size = _write_files(adapter, targets, temporary, base_model, weights_only)
        _sync(temporary)
        os.rename(temporary, target)
        _sync(target.parent)
    except BaseException as error:
        shutil.rmtree(temporary, ignore_errors=True)
        if isinstance(error, OSError | SafetensorError):
            raise CheckpointError(f"cannot save to {directory!r}: {error}") from _system_error(error)
        raise
    return size


def _system_error(error: OSError | SafetensorError) -> Exception:
    """Return an error of safetensors, which names the number of a system error in its text only, as an ``OSError``."""
    found = re.search(r"\(os error (\d+)\)", str(error))
    return OSError(int(found[1]), str(error)) if found and isinstance(error, SafetensorError) else error


def _write_files(
    adapter: Adapter, targets: Sequence[LoraTarget], directory: Path, base_model: str, weights_only: bool
) -> int:
    tensors, settings = to_peft(adapter.weights, targets, adapter.config, base_model)
    (directory / _SETTINGS).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    save_file(tensors, directory / _WEIGHTS, metadata={"format": "pt"})
    del tensors
    if not weights_only:
        save_file(_state_tensors(adapter), directory / _STATE)
    files = {path.name: _describe(path) for path in sorted(directory.iterdir())}
    manifest = _Manifest(
        format=FORMAT,
        base_model=base_model,
        lora=adapter.config,
        optimizer=adapter.optimizer,
        step=adapter.step,
        files=files,
    )
    manifest = msgspec.structs.replace(manifest, checksum=manifest.digest())
    (directory / _MANIFEST).write_bytes(msgspec.json.format(msgspec.json.encode(manifest)) + b"\n")
    for path in directory.iterdir():
        _sync(path)
    return sum(path.stat().st_size for path in directory.iterdir())


def _state_tensors(adapter: Adapter) -> dict[str, Tensor]:
    groups = dict(adapter.moments) if adapter.grads is None else {**adapter.moments, "grad": adapter.grads}
    return {
        f"{group}/{name}/{factor}": tensor.contiguous()
        for group, pairs in groups.items()
        for name, pair in pairs.items()
        for factor, tensor in zip("AB", pair, strict=True)
    }


def _describe(path: Path) -> _File:
    with path.open("rb") as file:
        return _File(size=path.stat().st_size, sha256=hashlib.file_digest(file, "sha256").hexdigest())


def _sync(path: Path) -> None:
    """Force a file's content, or a directory's entries, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


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
        _verify(path, manifest, _SETTINGS, _WEIGHTS)
    return from_peft(_load_tensors(path / _WEIGHTS), _read_settings(path), targets, config)


def load(adapter: Adapter, targets: Sequence[LoraTarget], directory: str, *, optimizer: bool) -> None:
    """Replace the weights of ``adapter``; with ``optimizer`` its moments, gradient and step too, else they are cleared.

    If anything does not fit, the adapter stays as it was.
    """
    weights = _to(load_weights(directory, targets, adapter.config), adapter.device)
    moments: dict[str, Pairs] = {}
    grads, step = None, 0
    if optimizer:
        moments, step = _load_state(directory, targets, adapter)
        moments = {group: _to(pairs, adapter.device) for group, pairs in moments.items()}
        grads = moments.pop("grad", None)
    adapter.weights, adapter.moments, adapter.grads, adapter.step = weights, moments, grads, step


def _load_state(directory: str, targets: Sequence[LoraTarget], adapter: Adapter) -> tuple[dict[str, Pairs], int]:
    path = Path(directory)
    manifest = _read_manifest(path)
    if manifest is None or _STATE not in manifest.files:
        raise CheckpointError(f"{directory!r} holds weights only; load it without the optimizer state")
    if manifest.optimizer != adapter.optimizer:
        raise CheckpointError(f"the saved run uses {manifest.optimizer}, this run {adapter.optimizer}")
    _verify(path, manifest, _STATE)
    tensors = _load_tensors(path / _STATE)
    groups: dict[str, Pairs] = {}
    for group in {name.split("/", 1)[0] for name in tensors}:
        groups[group] = {}
        for target in targets:
            if is_trained(target, adapter.config):
                a, b = (tensors.pop(f"{group}/{target.name}/{factor}", None) for factor in "AB")
                expected = shapes(target, adapter.rank)
                if a is None or b is None or (a.shape, b.shape) != expected:
                    raise CheckpointError(f"{_STATE} has no {group!r} of shapes {expected} for {target.name!r}")
                groups[group][target.name] = (a.clone(), b.clone())  # no longer views of the file
        if group != "grad" and not are_finite(flatten(groups[group])):
            raise CheckpointError(f"{_STATE} holds numbers in {group!r} that are not finite")
    if tensors:
        raise CheckpointError(f"{_STATE} holds {sorted(tensors)[0]!r}, which the run does not train")
    return groups, manifest.step


def _to(pairs: Pairs, device: torch.device) -> Pairs:
    return {name: (a.to(device), b.to(device)) for name, (a, b) in pairs.items()}


def _check_same_run(saved: LoraConfig, run: LoraConfig) -> None:
    for field in ("rank", "train_attn", "train_mlp", "train_unembed"):
        ours, theirs = getattr(run, field), getattr(saved, field)
        if ours != theirs:
            raise CheckpointError(f"the saved adapter has {field}={theirs!r}, the run has {field}={ours!r}")


def _read_manifest(directory: Path) -> _Manifest | None:
    if not directory.is_dir():
        raise CheckpointError(f"there is no directory {str(directory)!r}")
    path = directory / _MANIFEST
    if not path.exists():
        return None
    try:
        data = path.read_bytes()
        version = msgspec.json.decode(data, type=dict[str, Any]).get("format")
        if version != FORMAT:
            raise CheckpointError(f"{str(path)!r} has format {version!r}, this version of Lorimer reads {FORMAT}")
        manifest = msgspec.json.decode(data, type=_Manifest)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise CheckpointError(f"cannot read {str(path)!r}: {error}") from error
    if manifest.digest() != manifest.checksum:
        raise CheckpointError(f"{str(path)!r} is damaged: its checksum does not match its content")
    return manifest


def _verify(directory: Path, manifest: _Manifest, *names: str) -> None:
    for name in names:
        path, expected = directory / name, manifest.files.get(name)
        try:
            found = _describe(path)
        except OSError as error:
            raise CheckpointError(f"cannot read {str(path)!r}: {error}") from error
        if found != expected:
            raise CheckpointError(f"{str(path)!r} is damaged: it is {found}, recorded was {expected}")


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


def _load_tensors(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"cannot read {str(path)!r}: {error}") from error
