"""The exceptions of Lorimer, one tree.

    LorimerError
    ├── InvalidInput        what the caller sent cannot be done; the message names the field and what is accepted
    │   ├── Unsupported     a thing Tinker has and Lorimer does not, refused by its name
    │   ├── TooLarge        more bytes, tokens or items than the limit the message names
    │   ├── InvalidJson     a body that is not JSON, or not JSON that is accepted
    │   ├── InvalidField    a body with a field that does not fit
    │   ├── QuotaExceeded   more than the caller's quota allows until something is deleted
    │   └── NotFound        a run, sampler, loss or file that is not there
    ├── Unauthorized        no credential, or one that is not known or was revoked
    ├── Forbidden           a known caller who may not do this
    ├── Gone                something that was there and has ended or expired
    │   └── UnknownFuture   a future that the caller does not have; it may have been there
    ├── Busy                a full queue; the same request is accepted later
    ├── NoServer            no server answers, or it is not one of this protocol
    ├── PortTaken           the address to listen on is not available
    ├── StorageError        the database or the data directory cannot be used; nothing was changed
    │   ├── InUse           another process has the data directory or the database
    │   ├── DiskFull        the disk, or the quota on it, has no room left
    │   └── NameTaken       an object of this name exists already
    ├── Fenced              this process lost its lease, and must not write any more
    ├── ModelRefused        a base model that cannot be served, with the reason
    ├── ModelNotFound       a model reference that no source knows; lists the places looked at
    ├── CheckpointError     a saved state that is missing, torn or of another shape
    │   └── TornDownload    a download that ended before all of its bytes had arrived
    ├── HubError            the Hugging Face hub refused, or cannot be reached
    ├── Cancelled           the caller gave the request up
    └── EngineError         the engine failed at something that was in order; the operation did nothing
        └── EngineDied      its process ended while work was waiting

They say what went wrong in Lorimer's own words; only the HTTP server maps them to status codes. Recognise an error by
its class, never by its message; ``lorimer.client.errors`` derives the SDK's errors from these.
"""

import errno


class LorimerError(Exception):
    """Base of every error Lorimer raises on purpose."""


class InvalidInput(LorimerError):
    """The caller's input is wrong; nothing was changed."""


class Unsupported(InvalidInput):
    """The input asks for something Lorimer does not have."""


class TooLarge(InvalidInput):
    """The input exceeds a limit; the message has both numbers."""


class InvalidJson(InvalidInput):
    """The body is not JSON, or not JSON that is accepted."""


class InvalidField(InvalidInput):
    """The body has a field that does not fit."""


class QuotaExceeded(InvalidInput):
    """The caller has used up a quota; the message names it, with what is used and what is allowed."""


class NotFound(InvalidInput):
    """The input names something that does not exist."""


class Unauthorized(LorimerError):
    """The caller has not shown who they are."""


class Forbidden(LorimerError):
    """The caller is known and may not do this."""


class Gone(LorimerError):
    """What the input names has ended or expired."""


class UnknownFuture(Gone):
    """The input names a future that is not the caller's, or was never there."""


class Busy(LorimerError):
    """There is no room for the request now."""


class NoServer(LorimerError):
    """No server answers."""


class PortTaken(LorimerError):
    """The server cannot listen on the address; the message says why."""


class StorageError(LorimerError):
    """Durable facts cannot be read or written."""


class InUse(StorageError):
    """Another process has the data directory or the database."""


class DiskFull(StorageError):
    """There is no room left; the message has the bytes needed, where known, and the bytes free."""


class NameTaken(StorageError):
    """An object of this name exists already; objects are never overwritten."""


class Fenced(LorimerError):
    """This process lost its lease, so it must not write: another one computes its replicas."""


class ModelRefused(LorimerError):
    """The base model cannot be trained or sampled exactly, so it is not loaded."""


class ModelNotFound(LorimerError):
    """No source has the model; the message lists every place looked at."""


class CheckpointError(LorimerError):
    """A saved state cannot be read, or does not fit the run it is loaded into."""


class TornDownload(CheckpointError):
    """The connection ended before the whole file had arrived."""


class HubError(LorimerError):
    """The Hugging Face hub refused a request, or cannot be used."""


class Cancelled(LorimerError):
    """The request was cancelled by its caller."""


class EngineError(LorimerError):
    """The engine failed through no fault of the caller; nothing was changed."""


class EngineDied(EngineError):
    """The engine process ended before it answered."""


def is_disk_full(error: BaseException | None) -> bool:
    """Return whether an error, or one that it was raised from, is a full disk or an exhausted disk quota."""
    while error is not None:
        if isinstance(error, DiskFull) or (isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)):
            return True
        error = error.__cause__ or error.__context__
    return False
