"""Exports encrypted to age recipients, while they are downloaded.

The recipients are kept with the checkpoint, in its metadata, where everybody who may list it sees them. Exports are not
loaded or sampled, so that the files leave the server in no other form. The package `pyrage` does the work; a server
without it refuses such exports.
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
"""The name in the metadata of an export."""
SUFFIX = ".age"
MAX_RECIPIENTS = 10


def recipients_metadata(recipients: list[str] | None) -> dict[str, str] | None:
    """The metadata of an export to these recipients, which must be ones that can be encrypted to."""
    if not recipients:
        return None
    if len(recipients) > MAX_RECIPIENTS:
        raise TooLarge(f"age_encryption_recipients has {len(recipients)} keys; at most {MAX_RECIPIENTS} are accepted")
    parse_recipients(recipients)
    return {RECIPIENTS: orjson.dumps(recipients).decode()}


def recipients_of(checkpoint: Checkpoint) -> list[str]:
    """To whom an export is encrypted; nobody, if it is not."""
    if checkpoint.kind != "external":
        return []
    found: list[str] = orjson.loads(checkpoint.user_metadata.get(RECIPIENTS, "[]"))
    return found


def parse_recipients(recipients: list[str]) -> list[Any]:
    """The keys as the library has them: age's own and SSH's."""
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


def encrypted(source: Path, recipients: list[str], room: Path) -> tuple[BinaryIO, int]:
    """A file without a name, below `room`, with the encrypted content of another, and its size."""
    parsed = parse_recipients(recipients)
    import pyrage

    target = tempfile.TemporaryFile(dir=room)  # noqa: SIM115 - whoever sends it closes it
    try:
        with source.open("rb") as plain:
            pyrage.encrypt_io(plain, target, parsed)
        size = target.tell()
        target.seek(0)
    except BaseException as error:
        with suppress(OSError):  # what it could not write before it cannot write now
            target.close()
        if isinstance(error, OSError | pyrage.EncryptError):
            raise StorageError(f"the export cannot be encrypted: {error}") from error
        raise
    return target, size
