"""Reserves memory of this machine for engines, so that no two of them count on the same bytes.

A reservation is a file that its engine keeps locked. The kernel drops the lock when the process ends, however it ends,
and the next reader deletes the file. It says how much memory is reserved and not taken yet; what is taken shows as used
by itself. Engines of one user in one container or machine see each other's. Does not import torch.
"""

import fcntl
import os
import secrets
import tempfile
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import psutil

from lorimer.errors import EngineError, TooLarge

HOST = "cpu"
"""The device whose memory is that of the machine."""
WEIGHT_BYTES = 4
STATE_BYTES = 12
"""Bytes per parameter of a full run, besides the weight: its gradient and two moments, float32."""
COPY_BYTES = {"float32": 0, "bfloat16": 2}
"""Bytes per parameter of the copy that passes of a full run compute with, by their dtype."""


class _Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    device: str
    outstanding: int
    """Bytes that the engine has not taken yet, and may take at any time."""
    loading: int = 0
    """Bytes that it is taking right now. On the host the growth of the process counts as taken."""
    pid: int = 0
    used_before: int = 0
    """Resident bytes of the process when it began to load."""

    @property
    def not_taken(self) -> int:
        taken = 0
        if self.loading and self.device == HOST:
            try:
                taken = psutil.Process(self.pid).memory_info().rss - self.used_before
            except psutil.Error:  # of another container: nothing is known about it
                taken = 0
        return self.outstanding + max(0, self.loading - max(0, taken))


class Reservation:
    """What one engine reserves of one device, until it is closed or its process ends."""

    def __init__(self, directory: Path, record: _Record) -> None:
        """The caller holds the lock of ``directory``."""
        self._directory, self._record = directory, record
        path = directory / f"{secrets.token_hex(8)}.json"
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        fcntl.flock(self._descriptor, fcntl.LOCK_EX)
        self._write(record)
        self._close = weakref.finalize(self, _close, self._descriptor, path)

    @property
    def outstanding(self) -> int:
        return self._record.outstanding

    def loaded(self) -> None:
        """Record that the bytes that were to be loaded are taken."""
        self._change(msgspec.structs.replace(self._record, loading=0))

    def set_outstanding(self, num_bytes: int) -> None:
        """Record how much is still to be taken."""
        if num_bytes != self._record.outstanding:
            self._change(msgspec.structs.replace(self._record, outstanding=num_bytes))

    @contextmanager
    def taking(self, what: str, num_bytes: int, free: Callable[[], int]) -> Iterator[None]:
        """Reserve more while the block takes it. Raise `TooLarge` if it is not free besides all that is reserved."""
        before = self._record
        with _locked(self._directory):
            _check(what, num_bytes, free() - _sum(self._directory, before.device))
            self._write(msgspec.structs.replace(before, outstanding=before.outstanding + num_bytes))
        try:
            yield
        finally:
            self._change(before)

    def close(self) -> None:
        self._close()

    def _change(self, record: _Record) -> None:
        with _locked(self._directory):
            self._write(record)

    def _write(self, record: _Record) -> None:
        self._record = record
        data = msgspec.json.encode(record)
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, data, 0)


def reserve(
    device: str, *, outstanding: int = 0, loading: int = 0, what: str = "", free: Callable[[], int] | None = None
) -> Reservation:
    """Reserve memory for an engine. With ``free`` raise `TooLarge` if that and what others reserve leave too little."""
    directory = _open()
    process = psutil.Process()
    with _locked(directory):
        if free is not None:
            _check(what, outstanding + loading, free() - _sum(directory, device))
        used = process.memory_info().rss
        return Reservation(directory, _Record(device, outstanding, loading, process.pid, used))


def reserved_bytes(device: str = HOST) -> int:
    """Return the bytes of a device that engines have reserved and not taken yet."""
    directory = _open()
    with _locked(directory):
        return _sum(directory, device)


def host_free_bytes() -> int:
    """Return the memory of this machine, or container, that is not used."""
    return min(psutil.virtual_memory().available, _cgroup_room())


def fits_full_run(num_parameters: int, ranks: int = 1, dtype: str = "float32") -> bool:
    """Return whether the host has room for a full run of a model; each of several ranks loads the whole model first."""
    loaded = (WEIGHT_BYTES + COPY_BYTES[dtype]) * ranks
    return (loaded + STATE_BYTES) * num_parameters <= host_free_bytes() - reserved_bytes()


def format_bytes(size: int) -> str:
    return f"{size / 2**30:.1f} GiB" if size >= 0.05 * 2**30 else f"{size / 2**20:.1f} MiB"


def _check(what: str, needed: int, free: int) -> None:
    if needed > free:
        raise TooLarge(f"{what} needs {format_bytes(needed)}, {format_bytes(max(0, free))} free")


def _open() -> Path:
    """Return the directory of reservations, which nobody else may write."""
    # Services of systemd have directories for temporary files of their own, but share the one in memory.
    parents = [os.environ.get("TMPDIR", ""), "/dev/shm"]
    chosen = next((path for path in parents if path and os.access(path, os.W_OK | os.X_OK)), tempfile.gettempdir())
    directory = Path(chosen) / f"lorimer-memory-{os.getuid()}"
    directory.mkdir(mode=0o700, exist_ok=True)
    found = directory.lstat()
    if not directory.is_dir() or directory.is_symlink() or found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise EngineError(f"{str(directory)!r} must be a directory that only this user can write; delete it")
    return directory


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    descriptor = os.open(directory / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _sum(directory: Path, device: str) -> int:
    """Return what is reserved and not taken; delete the files of engines that have ended."""
    found = [record for path in directory.glob("*.json") if (record := _read(path)) is not None]
    return sum(record.not_taken for record in found if record.device == device)


def _read(path: Path) -> _Record | None:
    try:
        descriptor = os.open(path, os.O_RDWR)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return msgspec.json.decode(os.pread(descriptor, os.fstat(descriptor).st_size, 0), type=_Record)
    else:
        path.unlink(missing_ok=True)
        return None
    finally:
        os.close(descriptor)


def _close(descriptor: int, path: Path) -> None:
    path.unlink(missing_ok=True)
    os.close(descriptor)


def _cgroup_room() -> int:
    """Return the memory left under the container's limit, or a very large number if there is no limit."""
    for limit, usage in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        try:
            with open(limit) as most, open(usage) as used:
                text = most.read().strip()
                return 1 << 62 if text == "max" else max(0, int(text) - int(used.read()))
        except (OSError, ValueError):
            continue
    return 1 << 62
