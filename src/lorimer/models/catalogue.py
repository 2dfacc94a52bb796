"""List the base models on this machine: aliases and the hub cache. Downloads and loads nothing."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from lorimer.errors import ModelRefused
from lorimer.models.sources import ALIASES, WHEELS, alias_directory, check_directory, default_cache_directory


@dataclass(frozen=True)
class LocalModel:
    name: str
    """The name for `lorimer serve --model`."""
    kind: Literal["bundled", "debug", "alias", "hub cache"]
    directory: Path | None
    """None if it has to be downloaded or created first."""
    size_bytes: int
    """Size on disk, or of the download."""
    trouble: str = ""
    """Why it cannot be served, if it cannot."""


def local_models(cache: Path | None = None) -> list[LocalModel]:
    """Return aliases first, then the hub cache sorted by name."""
    cache = cache or default_cache_directory()
    return [*(_alias(name, cache) for name in ALIASES), *sorted(_in_hub_cache(), key=lambda model: model.name)]


def _alias(name: str, cache: Path) -> LocalModel:
    directory = alias_directory(name, cache)
    kind: Literal["bundled", "debug", "alias"]
    kind = "alias" if name in WHEELS else "bundled" if name == "lorimer/tiny" else "debug"
    if directory.is_dir():
        return LocalModel(name, kind, directory, directory_bytes(directory))
    return LocalModel(name, kind, None, WHEELS[name].num_bytes if name in WHEELS else 0)


def _in_hub_cache() -> Iterator[LocalModel]:
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        repositories = scan_cache_dir().repos
    except CacheNotFound:
        return
    for repository in repositories:
        revisions = sorted(repository.revisions, key=lambda revision: (bool(revision.refs), revision.last_modified))
        if repository.repo_type != "model" or not revisions:
            continue
        directory, trouble = revisions[-1].snapshot_path, ""
        if not (directory / "config.json").is_file():
            continue  # a tokenizer or the like, which cannot be served
        try:
            check_directory(directory)
        except ModelRefused as error:
            trouble = str(error)
        yield LocalModel(repository.repo_id, "hub cache", directory, repository.size_on_disk, trouble)


def directory_bytes(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())
