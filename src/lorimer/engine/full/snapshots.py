"""Snapshots of a full run: shards of its parameters, from which this engine or another one goes on bit for bit.

    training_state-KIND-GROUP-N.safetensors   the trained parameters of a group, their gradient or one of their moments
    lorimer.json                              configuration, step, digest of what is not trained, checksums of files

Parameters that are not trained are the base model's and are never written. A shard that an older snapshot has unchanged
becomes a link to it. Each byte is read once from memory to be hashed, and once to be written.
"""

import hashlib
import os
from collections.abc import Collection, Iterator
from pathlib import Path

import msgspec
import torch

from lorimer.engine.directories import FORMAT, File, read_manifest, write_manifest
from lorimer.engine.full.checkpoints import STATE, RunManifest, collect, first_writes, split_shards
from lorimer.engine.full.full_run import FullRun, Tensors, bytes_of
from lorimer.errors import CheckpointError

_DTYPES = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float64: "F64",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.bool: "BOOL",
}
"""The names of dtypes in safetensors files."""
_ALIGNMENT = 8


def save_snapshot(run: FullRun, directory: str, shares_with: str = "") -> int:
    """Write the run into ``directory``, which is absent or empty, and return the bytes that it occupies.

    On failure nothing is left behind. Of several ranks all take part, and rank 0 writes, a shard at a time.
    """
    run.check_finite("saved")
    frozen_sha256 = run.frozen_sha256
    with first_writes(run, directory) as temporary:
        older = _files_of(Path(shares_with)) if shares_with and run.shards.rank == 0 else {}
        files: dict[str, File] = {}
        state = run.state(with_weights=True)
        for name, keys in _parts(run):
            tensors = collect(run, {key: state[key] for key in keys})
            with run.shards.agreed():
                if tensors is not None:
                    files[name] = _write(temporary / name, tensors, Path(shares_with) / name, older.get(name))
        if run.shards.rank:
            return 0
        manifest = RunManifest(
            format=FORMAT,
            base_model=run.model.name,
            full=run.config,
            optimizer=run.optimizer,
            step=run.step,
            frozen_sha256=frozen_sha256,
            files=files,
        )
        return write_manifest(temporary, manifest)


def _files_of(directory: Path) -> dict[str, File]:
    """Return the files of an older snapshot; nothing if it is gone or damaged."""
    try:
        manifest = read_manifest(directory, RunManifest)
    except CheckpointError:
        return {}
    return manifest.files if manifest is not None else {}


def _parts(run: FullRun) -> Iterator[tuple[str, Collection[str]]]:
    """Yield the shards by name: of one kind and group, so that one that does not change is not written again."""
    parts: dict[str, Tensors] = {}
    for key, (kind, name, _) in run.state(with_weights=True).items():
        part = f"{kind}-{'-'.join(sorted(run.groups[name]))}"
        parts.setdefault(part, {})[key] = run.division.describe(kind, name)
    for part, tensors in sorted(parts.items()):
        for number, shard in enumerate(split_shards(tensors), 1):
            yield f"{STATE}-{part}-{number:05}.safetensors", shard.keys()


def _write(path: Path, tensors: Tensors, older: Path, recorded: File | None) -> File:
    """Write a shard, or link the older file if that was recorded with the same content."""
    header = _header(tensors)
    digest, size = hashlib.sha256(header), len(header)
    for tensor in tensors.values():
        digest.update(bytes_of(tensor))
        size += tensor.nbytes
    found = File(size=size, sha256=digest.hexdigest())
    if found == recorded and _link(older, path):
        return found
    with path.open("wb") as file:
        file.write(header)
        for tensor in tensors.values():
            file.write(bytes_of(tensor))
    return found


def _link(older: Path, path: Path) -> bool:
    """Share a file that no third snapshot shares; return false if that cannot be."""
    try:
        if older.stat().st_nlink > 1:
            return False
        os.link(older, path)
    except OSError:  # it is gone, or the file system has no links
        return False
    return True


def _header(tensors: Tensors) -> bytes:
    """Return what precedes the bytes of tensors in a safetensors file."""
    entries, offset = {}, 0
    for name, tensor in tensors.items():
        end = offset + tensor.nbytes
        entries[name] = {
            "dtype": _DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = msgspec.json.encode(entries)
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text
