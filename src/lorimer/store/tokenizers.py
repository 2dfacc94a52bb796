"""Tokenizer files of base models as objects, so that a server without the model's directory can serve them.

tokenizers/files/<sha256>    one file, the same for every model that has it
tokenizers/models/<sha256>   the listing of a model, by the SHA-256 of its name: replaced when an engine is ready
"""

import asyncio
import hashlib
import secrets
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import msgspec

from lorimer.errors import CheckpointError, NameTaken
from lorimer.store.objects import Objects
from lorimer.store.weights import WeightsFile

FILES = (
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "config.json",
    "merges.txt",
    "preprocessor_config.json",
    "processor_config.json",
    "sentencepiece.bpe.model",
    "special_tokens_map.json",
    "spiece.model",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "vocab.txt",
)
"""The files that ``transformers`` loads a tokenizer or an image processor from; no other file is served."""

Listing = dict[str, WeightsFile]


def describe_files(directory: Path) -> Listing:
    """Return size and SHA-256 of the tokenizer files of a model's directory."""
    found = {name: (directory / name).read_bytes() for name in FILES if (directory / name).is_file()}
    return {
        name: {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()} for name, content in found.items()
    }


async def publish(objects: Objects, model: str, directory: Path) -> Listing:
    """Store the tokenizer files of a base model, its listing last."""
    listing = await asyncio.to_thread(describe_files, directory)
    for name, file in listing.items():
        try:
            await objects.put(
                f"tokenizers/files/{file['sha256']}", await asyncio.to_thread((directory / name).read_bytes)
            )
        except NameTaken:
            continue  # named by its content
    await objects.put(_listing_name(model), msgspec.json.encode(listing), replace=True)
    return listing


async def find(objects: Objects, model: str) -> Listing:
    """Return the stored tokenizer files of a base model. Raise ``CheckpointError`` if there are none."""
    return msgspec.json.decode(await objects.get(_listing_name(model)), type=Listing)


async def read(objects: Objects, file: WeightsFile) -> bytes:
    """Return one file of a listing, verified."""
    name = f"tokenizers/files/{file['sha256']}"
    data = await objects.get(name)
    if hashlib.sha256(data).hexdigest() != file["sha256"]:
        raise CheckpointError(f"the object {name!r} is damaged: its SHA-256 is not the one in its name")
    return data


async def fetch(objects: Objects, model: str, directory: Path) -> Path:
    """Copy the tokenizer files of a base model below ``directory``, and return where they are."""
    listing = await find(objects, model)
    name = hashlib.sha256(msgspec.json.encode([model, *sorted(file["sha256"] for file in listing.values())]))
    target = directory / "tokenizers" / name.hexdigest()[:32]
    if not target.is_dir():
        contents = {file: await read(objects, described) for file, described in listing.items()}
        await asyncio.to_thread(_write_all, target, contents)
    return target


def _write_all(target: Path, contents: Mapping[str, bytes]) -> None:
    temporary = target.with_name(f"{target.name}.tmp-{secrets.token_hex(4)}")
    temporary.mkdir(parents=True, mode=0o700)
    for name, content in contents.items():
        (temporary / name).write_bytes(content)
    with suppress(OSError):  # another process was quicker
        temporary.rename(target)


def _listing_name(model: str) -> str:
    return f"tokenizers/models/{hashlib.sha256(model.encode()).hexdigest()}"
