"""Export a saved adapter or full run as a PEFT directory, a Hugging Face directory, a GGUF file, or for Ollama.

The output is checked first and then appears atomically. The caller finds the base model; `merging.py` merges,
`check.py` compares and `gguf.py` converts.
"""

import json
import os
import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import msgspec
import torch

from lorimer.engine.adapters.checkpoints import read_config
from lorimer.errors import CheckpointError, InvalidInput
from lorimer.models.export.check import Comparison, check_merged
from lorimer.models.export.gguf import GgufType, ReadBack, check_gguf, find_converter, write_gguf
from lorimer.models.export.merging import LoadedAdapter, MergedDtype, Progress, merge
from lorimer.models.export.ollama import describe_model
from lorimer.models.gguf.reader import read_gguf

ExportDtype = Literal["auto", "float32", "bfloat16", "float16", "q8_0"]
"""``q8_0`` is for GGUF only."""

_SETTINGS, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_KINDS: dict[torch.dtype, GgufType] = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}


@dataclass(frozen=True)
class Exported:
    path: Path
    size_bytes: int
    comparison: Comparison | None = None
    """Comparison of the merged model with base and adapter; None if nothing was merged, or unchecked."""
    read_back: ReadBack | None = None
    """The check of a GGUF file, if it was made."""


def is_full_run(directory: Path) -> bool:
    """Return whether a saved run is a full one: the weights of a whole model, and not an adapter."""
    return (directory / "config.json").is_file() and not (directory / _SETTINGS).exists()


def export_full(saved: Path, output: Path, dtype: ExportDtype) -> Exported:
    """Write the model of a full run as it is, without the state of training."""
    if dtype not in ("auto", "float32"):
        raise InvalidInput(f"dtype {dtype!r}: a full run is exported in float32, as it was trained; 'auto' is accepted")
    with placed(output) as directory:
        _copy_model(saved, directory)
    return Exported(output, _size(output))


def export_full_gguf(
    saved: Path,
    output: Path,
    dtype: ExportDtype,
    *,
    llama_cpp: Path | None,
    cache: Path | None,
    is_checked: bool,
    progress: Progress,
) -> Exported:
    """Write the model of a full run as one file for llama.cpp."""
    converter = find_converter(llama_cpp, cache, progress)
    kind: GgufType = "f32" if dtype == "auto" else "q8_0" if dtype == "q8_0" else _KINDS[getattr(torch, dtype)]
    with placed(output) as file, tempfile.TemporaryDirectory(dir=file.parent, prefix=".lorimer-") as temporary:
        directory = Path(temporary) / output.stem
        _copy_model(saved, directory)
        write_gguf(directory, file, kind, converter, progress)
        read_back = check_gguf(directory, file, kind, progress) if is_checked else None
    return Exported(output, _size(output), read_back=read_back)


def _copy_model(saved: Path, directory: Path) -> None:
    directory.mkdir()
    for path in sorted(saved.iterdir()):
        if path.name != "lorimer.json" and not path.name.startswith("training_state"):
            shutil.copyfile(path, directory / path.name)


def base_model_of(adapter: Path) -> str:
    """Return the name of the base model that an adapter was trained on."""
    name = _settings(adapter).get("base_model_name_or_path")
    if not isinstance(name, str) or not name:
        raise CheckpointError(f"{str(adapter / _SETTINGS)!r} does not name its base model; give it with --base")
    return name


def export_peft(adapter: Path, output: Path, base_model: str) -> Exported:
    """Write the adapter as a directory for PEFT and vLLM, without training state; its config names ``base_model``."""
    read_config(str(adapter))
    settings = _settings(adapter) | {"base_model_name_or_path": base_model}
    with placed(output) as directory:
        directory.mkdir()
        (directory / _SETTINGS).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
        shutil.copyfile(adapter / _WEIGHTS, directory / _WEIGHTS)
    return Exported(output, _size(output))


def export_merged(
    adapter: Path, base: Path, output: Path, dtype: MergedDtype, *, is_checked: bool, progress: Progress
) -> Exported:
    """Write the merged model as a directory for transformers, vLLM and others."""
    loaded = LoadedAdapter(adapter, base)
    with placed(output) as directory:
        directory.mkdir()
        dtypes = merge(loaded, base, directory, dtype, progress)
        comparison = check_merged(loaded, base, directory, dtypes, progress) if is_checked else None
    return Exported(output, _size(output), comparison)


def export_gguf(
    adapter: Path,
    base: Path,
    output: Path,
    dtype: ExportDtype,
    *,
    llama_cpp: Path | None,
    cache: Path | None,
    is_checked: bool,
    progress: Progress,
) -> Exported:
    """Write the merged model as one file for llama.cpp."""
    converter = find_converter(llama_cpp, cache, progress)
    loaded = LoadedAdapter(adapter, base)
    comparison = read_back = None
    with placed(output) as file, tempfile.TemporaryDirectory(dir=file.parent, prefix=".lorimer-") as temporary:
        directory = Path(temporary) / output.stem  # the converter names the model after it
        directory.mkdir()
        dtypes = merge(loaded, base, directory, "auto" if dtype == "q8_0" else dtype, progress)
        if is_checked:
            comparison = check_merged(loaded, base, directory, dtypes, progress)
        kind: GgufType = "q8_0" if dtype == "q8_0" else _KINDS[max(dtypes, key=lambda each: each.itemsize)]
        write_gguf(directory, file, kind, converter, progress)
        if is_checked:
            read_back = check_gguf(directory, file, kind, progress)
    return Exported(output, _size(output), comparison, read_back)


def export_ollama(model: Path, output: Path, write: Callable[[Path], Exported]) -> Exported:
    """Write a directory for ``ollama create``: the GGUF file of ``write``, and a Modelfile for ``model``."""
    description = describe_model(model)  # before anything is computed, as it may refuse
    with placed(output) as directory:
        directory.mkdir()
        exported = write(directory / f"{output.name}.gguf")
        modelfile = description.modelfile(read_gguf(exported.path))
        (directory / "Modelfile").write_text(modelfile, encoding="utf-8")
    return replace(exported, path=output, size_bytes=_size(output))


@contextmanager
def placed(target: Path) -> Iterator[Path]:
    """Yield a temporary path beside ``target``; rename it to ``target``, absent or empty, when the block succeeds."""
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise InvalidInput(f"{str(target)!r} is there already; a path that is not is accepted")
    temporary = target.with_name(f".{target.name}.partial-{secrets.token_hex(4)}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        yield temporary
        for path in [temporary, *temporary.rglob("*")]:
            _sync(path)
        os.rename(temporary, target)
        _sync(target.parent)
    except OSError as error:
        raise CheckpointError(f"{str(target)!r} cannot be written: {error.strerror or error}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        if temporary.is_file():
            temporary.unlink()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _settings(adapter: Path) -> dict[str, Any]:
    path = adapter / _SETTINGS
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.MsgspecError) as error:
        raise CheckpointError(f"{str(adapter)!r} is no adapter: {path.name} cannot be read: {error}") from error


def _size(path: Path) -> int:
    return sum(each.stat().st_size for each in [path, *path.rglob("*")] if each.is_file())
