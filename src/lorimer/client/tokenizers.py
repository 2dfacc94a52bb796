"""The tokenizer of a base model: from where the server says, or from the server itself.

Its files are kept in the user's cache by their content, so that they are fetched once. Loading takes
``transformers``, which a client need not have otherwise.
"""

import hashlib
import os
import tempfile
from functools import lru_cache
from pathlib import Path
from typing import Any
from urllib.parse import quote

from lorimer.client.connection import Connection
from lorimer.client.errors import NotFoundError
from lorimer.errors import NotFound
from lorimer.types import GetServerCapabilitiesResponse
from lorimer.types.base import Response
from lorimer.types.extras import load


class TokenizerFile(Response):
    size: int
    sha256: str


class TokenizerFiles(Response):
    """The files of a tokenizer, by their names."""

    files: dict[str, TokenizerFile]


def load_tokenizer(connection: Connection, model_name: str, tokenizer_id: str | None) -> Any:
    """A tokenizer of ``transformers``; ``tokenizer_id`` is a hub id or a directory, perhaps of the server's machine."""
    if tokenizer_id and os.path.isdir(tokenizer_id):
        return _load(tokenizer_id)
    try:
        directory = connection.run(_fetch(connection, model_name)).result()
    except NotFoundError as missing:  # the server does not hand tokenizers out, or does not serve the model
        if tokenizer_id is None and not connection.run(_is_served(connection, model_name)).result():
            raise NotFound(f"no tokenizer of {model_name!r}: the server answers {str(missing)!r}") from missing
        source = tokenizer_id.partition(":")[0] if tokenizer_id else _hub_id(model_name)
        try:
            return _load(source)
        except OSError as error:
            text = (
                f"no tokenizer of {model_name!r}: the server answers {str(missing)!r}, and {source!r} cannot be loaded"
            )
            raise NotFound(text) from error
    return _load(str(directory))


async def _is_served(connection: Connection, model_name: str) -> bool:
    path = "/api/v1/get_server_capabilities"
    found = await connection.transport.ask(GetServerCapabilitiesResponse, "GET", path)
    return model_name in [model.model_name for model in found.supported_models]


@lru_cache(maxsize=32)
def _load(source: str) -> Any:
    transformers = load("transformers", "get_tokenizer", "transformers (pip install transformers)")
    tokenizer = transformers.AutoTokenizer.from_pretrained(source)
    # Its warning of "indexing errors" is wrong here: loops truncate, and the server refuses what is too long by name.
    tokenizer.deprecation_warnings["sequence-length-is-longer-than-the-specified-maximum"] = True
    return tokenizer


def _hub_id(model_name: str) -> str:
    """A model may be served as ``organisation/model/variant:tag``."""
    return "/".join(model_name.partition(":")[0].split("/")[:2])


async def _fetch(connection: Connection, model_name: str) -> Path:
    """A directory with the files, fetched unless they are there."""
    path = f"/api/v1/models/{quote(model_name, safe='/')}/tokenizer"
    listed = await connection.transport.ask(TokenizerFiles, "GET", path)
    contents = sorted((name, file.sha256) for name, file in listed.files.items())
    directory = cache_directory() / hashlib.sha256(repr(contents).encode()).hexdigest()[:32]
    if directory.is_dir():
        return directory
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory.parent) as temporary:
        part = Path(temporary) / "files"
        part.mkdir()
        for name, digest in contents:
            content = (await connection.transport.call("GET", f"{path}/{quote(name, safe='')}")).content
            if hashlib.sha256(content).hexdigest() != digest or Path(name).name != name:
                raise ValueError(f"the server's tokenizer file {name!r} does not have the content it lists")
            (part / name).write_bytes(content)
        try:
            part.rename(directory)
        except OSError:
            if not directory.is_dir():  # unless another process was faster
                raise
    return directory


def cache_directory() -> Path:
    home = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(home) if os.path.isabs(home) else Path.home() / ".cache") / "lorimer" / "tokenizers"
