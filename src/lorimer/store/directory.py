"""The data directory: who holds it, what lies in it, and what may be removed from it.

    lock           held by the running server (flock), with its process id and host
    secret         32 random bytes that sign download links
    lorimer.db     the database, unless another was named
    weights/       one directory per saved weights, by random name
    snapshots/     one directory per snapshot of a run
    blobs/         payloads and results too large for a row
    restoring/     there only while `lorimer restore` fills the directory; a server refuses to start beside it

Users' names never become file names. Directories are 0700, files 0600.
"""

import errno
import fcntl
import os
import re
import secrets
import shutil
import socket
import stat
import threading
from contextlib import suppress
from pathlib import Path

from lorimer.errors import DiskFull, InUse, StorageError

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")
_PLACES = ("weights", "snapshots", "blobs")
_SECRET_BYTES = 32
RESTORING = "restoring"


class DataDirectory:
    """The data directory ``path``, created if missing. Refuses a symbolic link and a world-writable directory."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path).expanduser().absolute()
        self._lock: int | None = None
        self._guard = threading.Lock()
        self._num_holds = 0
        self._deferred: list[Path] = []
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            _make_private(self.path)
            for place in _PLACES:
                _make_private(self.path / place)
        except OSError as error:
            raise storage_error(error, Path(error.filename or self.path), "be a data directory") from error
        self.weights, self.snapshots, self.blobs = (self.path / place for place in _PLACES)

    def lock(self, *, is_restore: bool = False, is_shared: bool = False) -> None:
        """Lock the directory until `unlock` or the end of the process. Refuse if another process holds it.

        With ``is_shared`` other processes that share it may hold it too. Also refuse a directory with an unfinished
        restore, unless ``is_restore``.
        """
        file = self.path / "lock"
        try:
            descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise storage_error(error, file, "be opened") from error
        try:
            fcntl.flock(descriptor, (fcntl.LOCK_SH if is_shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.pread(descriptor, 300, 0).decode("utf-8", "replace").strip() or "an unknown process"
            os.close(descriptor)
            raise InUse(
                f"the data directory {str(self.path)!r} is in use by {owner};"
                " stop that server or choose another directory with --data"
            ) from None
        except OSError as error:
            os.close(descriptor)
            raise storage_error(error, file, "be locked") from error
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
        self._lock = descriptor
        if not is_restore and (self.path / RESTORING).exists():
            self.unlock()
            raise StorageError(
                f"a restore into the data directory {str(self.path)!r} did not finish; run `lorimer restore` again"
            )

    def unlock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    @property
    def secret(self) -> bytes:
        """Return the 32 random bytes of the secret, created on first use."""
        file = self.path / "secret"
        try:
            if not file.exists():
                _create_file(file, secrets.token_bytes(_SECRET_BYTES))
            found = file.read_bytes()
        except OSError as error:
            raise storage_error(error, file, "be read") from error
        if len(found) != _SECRET_BYTES:
            raise StorageError(
                f"{str(file)!r} has {len(found)} bytes instead of {_SECRET_BYTES}; remove it to renew it"
            )
        return found

    def new_weights_directory(self) -> Path:
        """Return a new path for weights. The engine creates the directory atomically."""
        return self.weights / secrets.token_hex(16)

    def new_snapshot_directory(self) -> Path:
        return self.snapshots / secrets.token_hex(16)

    def remove(self, path: Path | str) -> None:
        """Delete one entry of ``weights/``, ``snapshots/`` or ``blobs/`` if it exists."""
        target = Path(path)
        target = target if target.is_absolute() else self.path / target
        parent, name = target.parent, target.name
        if parent not in (self.weights, self.snapshots, self.blobs) or not _NAME.fullmatch(name) or ".." in name:
            raise StorageError(
                f"{str(path)!r} is not removed: only entries of {', '.join(_PLACES)} below {str(self.path)!r} are"
            )
        with self._guard:
            if self._num_holds:
                self._deferred.append(target)
                return
        self._remove(target)

    def hold_files(self) -> None:
        """Defer every `remove` until `release_files`. Holds nest.

        Rows are deleted before their files, so a reader that holds files finds the file of every row it reads.
        """
        with self._guard:
            self._num_holds += 1

    def release_files(self) -> None:
        """End one hold. After the last one, delete the deferred files."""
        with self._guard:
            self._num_holds -= 1
            if self._num_holds:
                return
            due, self._deferred = self._deferred, []
        for target in due:
            with suppress(StorageError):  # the sweep at the next start deletes it
                self._remove(target)

    @property
    def is_held(self) -> bool:
        return self._num_holds > 0

    def _remove(self, target: Path) -> None:
        try:
            if target.is_dir() and not target.is_symlink():
                shutil.rmtree(target)
            else:
                target.unlink(missing_ok=True)
        except FileNotFoundError:
            pass
        except OSError as error:
            raise storage_error(error, target, "be removed") from error

    def sweep_orphans(self, known: set[str]) -> list[str]:
        """Delete the leftovers of a crashed server: entries whose names are not ``known``, and temporary entries.

        Call with the lock held, before anything is written. Returns the deleted names.
        """
        removed = []
        for place in (self.weights, self.snapshots, self.blobs):
            for entry in sorted(os.listdir(place)):
                if (entry not in known or ".tmp-" in entry) and _NAME.fullmatch(entry):
                    self.remove(place / entry)
                    removed.append(entry)
        return removed

    def free_bytes(self) -> int:
        return free_bytes(self.path)


def free_bytes(path: Path) -> int:
    """Return the bytes available to an unprivileged user on the file system of ``path``."""
    found = os.statvfs(path)
    return found.f_bavail * found.f_frsize


def write_file(path: Path, data: bytes, *, sync: bool) -> None:
    """Write a file atomically. With ``sync`` it also survives a power failure."""
    temporary = path.with_name(f"{path.name}.tmp-{secrets.token_hex(4)}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(descriptor, "wb", buffering=0) as file:
            view = memoryview(data)
            while view:
                view = view[file.write(view) :]
            if sync:
                os.fsync(file.fileno())
        os.rename(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    if sync:
        sync_directory(path.parent)


def _create_file(path: Path, data: bytes) -> None:
    """Write a file whole, unless another process has done so."""
    temporary = path.with_name(f"{path.name}.tmp-{secrets.token_hex(4)}")
    write_file(temporary, data, sync=True)
    with suppress(FileExistsError):
        os.link(temporary, path)
    temporary.unlink()
    sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def storage_error(error: OSError, path: Path, action: str, needed: int | None = None) -> StorageError:
    """Convert an ``OSError``: a full disk with its numbers, any other error with the system's reason."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        place = path if path.exists() else path.parent
        need = "" if needed is None else f"{needed} bytes are needed and "
        return DiskFull(f"the disk is full: {need}{free_bytes(place)} bytes are free in {str(place)!r}")
    return StorageError(f"{str(path)!r} cannot {action}: {error.strerror or error}")


def _make_private(path: Path) -> None:
    try:
        path.mkdir(mode=0o700)
    except FileExistsError:
        found = path.lstat()
        if stat.S_ISLNK(found.st_mode):
            raise StorageError(f"{str(path)!r} is a symbolic link; name the directory itself") from None
        if not stat.S_ISDIR(found.st_mode):
            raise StorageError(f"{str(path)!r} is not a directory") from None
        if found.st_mode & 0o002:
            raise StorageError(f"every user can write to {str(path)!r}; take that away with chmod o-w") from None
    else:
        path.chmod(0o700)
