"""Encrypts exports to age recipients while they are downloaded.

The recipients are stored in the checkpoint's metadata, visible to everybody who may list it. Exports cannot be loaded
or sampled, so the files leave the server only in encrypted form. Needs the package `pyrage`; a server without it
refuses such exports.
"""

import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import orjson

from lorimer.errors import InvalidInput, StorageError, TooLarge, Unsupported
from lorimer.server.routes.ownership import quote_id
from lorimer.store.checkpoints import Checkpoint

RECIPIENTS = "age_recipients"
"""The key of the recipients in an export's metadata."""
SUFFIX = ".age"
MAX_RECIPIENTS = 10


def recipients_metadata(recipients: list[str] | None) -> dict[str, str] | None:
    """Validate the recipients and return them as metadata of the export."""
    if not recipients:
        return None
    if len(recipients) > MAX_RECIPIENTS:
        raise TooLarge(f"age_encryption_recipients has {len(recipients)} keys; at most {MAX_RECIPIENTS} are accepted")
    parse_recipients(recipients)
    return {RECIPIENTS: orjson.dumps(recipients).decode()}


def recipients_of(checkpoint: Checkpoint) -> list[str]:
    """Return the recipients that an export is encrypted to; empty if it is not encrypted."""
    if checkpoint.kind != "external":
        return []
    found: list[str] = orjson.loads(checkpoint.user_metadata.get(RECIPIENTS, "[]"))
    return found


def parse_recipients(recipients: list[str]) -> list[Any]:
    """Parse age and SSH public keys into `pyrage` recipients."""
    try:
        import pyrage  # type: ignore[import-untyped]
    except ImportError:
        raise Unsupported("age_encryption_recipients needs the package 'pyrage', which this server lacks") from None
    parsed = []
    for recipient in recipients:
        kind = pyrage.ssh if recipient.startswith("ssh-") else pyrage.x25519
        try:
            parsed.append(kind.Recipient.from_str(recipient))
        except pyrage.RecipientError:
            raise InvalidInput(
                f"{quote_id(recipient)} is no recipient; "
                "'age1...' and the SSH keys 'ssh-ed25519 ...' and 'ssh-rsa ...' are accepted"
            ) from None
    return parsed


class Sink:
    """A file to write to that keeps its error, of which the encryption only passes on the text."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.error: OSError | None = None

    def write(self, data: bytes) -> int:
        try:
            return self._file.write(data)
        except OSError as error:
            self.error = error
            raise

    def flush(self) -> None:
        try:
            self._file.flush()
        except OSError as error:
            self.error = error
            raise


def encrypted(source: Path, recipients: list[str], room: Path) -> tuple[BinaryIO, int]:
    """Encrypt a file into an anonymous temporary file in `room`. Return that file and its size."""
    parsed = parse_recipients(recipients)
    import pyrage

    target = tempfile.TemporaryFile(dir=room)  # noqa: SIM115 - whoever sends it closes it
    sink = Sink(target)
    try:
        with source.open("rb") as plain:
            pyrage.encrypt_io(plain, sink, parsed)
        size = target.tell()
        target.seek(0)
    except BaseException as error:
        with suppress(OSError):  # closing may fail to flush again
            target.close()
        if isinstance(error, OSError | pyrage.EncryptError):
            raise StorageError(f"the export cannot be encrypted: {error}") from (sink.error or error)
        raise
    return target, size
