"""Compiles the C files of this folder for the CPU that it runs on, and loads them.

A C compiler is all it takes. The library is kept in the user's cache, under the digest of what it depends on. What the
functions compute and who checks them: `decode.py`.
"""

import contextlib
import ctypes
import functools
import hashlib
import os
import platform
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

FOLDER = Path(__file__).parent
LANES = 16
"""Sizes of rows are multiples of this many numbers."""
POINTER = ctypes.c_void_p
INT = ctypes.c_int64
_DTYPES = {torch.float32: (), torch.bfloat16: ("-DBFLOAT16",)}
_FLAGS = ("-O2", "-fPIC", "-shared")
# Not on macOS: a second OpenMP library beside torch's would end the process.
_THREADS: tuple[tuple[str, ...], ...] = ((),) if sys.platform == "darwin" else (("-fopenmp",), ())
_CHOICES = tuple((cpu, *threads) for cpu in ("-march=native", "-mcpu=native") for threads in _THREADS)
"""The first that the compiler accepts is taken. For any CPU of a kind they would be slower than torch."""
_SECONDS = 60


@dataclass(frozen=True, eq=False)
class Library:
    """The compiled functions for one dtype, before their arguments are known."""

    functions: ctypes.CDLL
    compiler: str
    dtype: torch.dtype

    def accepts(self, *tensors: Tensor) -> bool:
        """Return whether the functions can read and write tensors."""
        return all(tensor.dtype == self.dtype and tensor.is_contiguous() for tensor in tensors)

    def address(self, tensor: Tensor, num_columns: int) -> int:
        if not self.accepts(tensor) or tensor.shape[-1] != num_columns:
            raise ValueError(
                f"a tensor of {tensor.dtype}, {tuple(tensor.shape)}, is not laid out for compiled functions"
            )
        return tensor.data_ptr()


def declare(function: "ctypes._NamedFuncPointer", *arguments: type) -> "ctypes._NamedFuncPointer":
    function.argtypes, function.restype = list(arguments), None
    return function


@functools.cache
def load(dtype: torch.dtype) -> Library | str:
    """Return the functions for a dtype on this machine's CPU, or why there are none."""
    if dtype not in _DTYPES:
        return f"there are none for {dtype}"
    compiler = next(filter(None, map(shutil.which, (os.environ.get("CC", "cc"), "gcc", "clang"))), None)
    if compiler is None:
        return "there is no C compiler (CC, cc, gcc or clang)"
    try:
        version = subprocess.run([compiler, "--version"], capture_output=True, timeout=_SECONDS, check=True).stdout
        name = version.decode(errors="replace").partition("\n")[0]
        with _cache_directory() as directory:
            path = _library(directory, compiler, name, _DTYPES[dtype])
            try:
                return Library(ctypes.CDLL(str(path)), name, dtype)
            except OSError:  # it was cut off, by a crash of the machine
                path.unlink()
                path = _library(directory, compiler, name, _DTYPES[dtype])
                return Library(ctypes.CDLL(str(path)), name, dtype)
    except (OSError, subprocess.SubprocessError) as error:
        return f"{compiler} cannot compile them: {error}"


def _library(directory: Path, compiler: str, version: str, flags: tuple[str, ...]) -> Path:
    """Return the compiled library, from ``directory`` if it is there."""
    machine = [version, torch.__version__, platform.machine(), _cpu_features()]
    sources = sorted(FOLDER.glob("*.c"))
    text = [path.read_text("utf-8") for path in (*sources, *sorted(FOLDER.glob("*.h")))]
    depends = [*text, *machine, repr((_FLAGS, _CHOICES)), *flags]
    digest = hashlib.sha256("\0".join(depends).encode()).hexdigest()[:32]
    path = directory / f"lorimer-{digest}.so"
    if path.exists() and _is_ours(path) and _is_whole(path):
        return path
    descriptor, made = tempfile.mkstemp(".so", dir=directory)
    os.close(descriptor)
    try:
        said = ""
        for choice in _CHOICES:
            command = [compiler, *_FLAGS, *choice, *flags, "-o", made, *map(str, sources), "-lm"]
            done = subprocess.run(command, capture_output=True, timeout=_SECONDS, check=False)
            if done.returncode == 0:
                _seal(Path(made))
                os.chmod(made, 0o700)  # a linker may have made the file anew, by the user's mask
                os.replace(made, path)
                return path
            said = (done.stderr.decode(errors="replace").strip().splitlines() or [f"code {done.returncode}"])[-1]
        raise OSError(said)
    finally:
        Path(made).unlink(missing_ok=True)


def _seal(path: Path) -> None:
    """Append the digest of a library, which a loader ignores: one that was cut off would end the process (SIGBUS)."""
    digest = hashlib.sha256(path.read_bytes()).digest()
    with path.open("ab") as file:
        file.write(digest)


def _is_whole(path: Path) -> bool:
    content = path.read_bytes()
    return hashlib.sha256(content[:-32]).digest() == content[-32:]


def _cpu_features() -> str:
    """Return what decides what ``-march=native`` means: a home may be shared by machines that differ."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8", "replace").splitlines()
    except OSError:
        return platform.processor()
    return "\n".join(sorted({line for line in lines if line.startswith(("flags", "Features", "model name"))}))


@contextlib.contextmanager
def _cache_directory() -> Iterator[Path]:
    """Yield a directory that only this user can write to, because what is in it will be run."""
    home = os.environ.get("XDG_CACHE_HOME", "")
    try:
        directory = (Path(home) if os.path.isabs(home) else Path.home() / ".cache") / "lorimer" / "kernels"
        directory.mkdir(0o700, parents=True, exist_ok=True)
        is_good = _is_ours(directory) and os.access(directory, os.W_OK)
    except (OSError, RuntimeError):  # there is no home, or it cannot be written to
        is_good = False
    if is_good:
        yield directory
    else:
        with tempfile.TemporaryDirectory(prefix="lorimer-kernels-") as temporary:
            yield Path(temporary)


def _is_ours(path: Path) -> bool:
    status = path.stat()
    return status.st_uid in (os.geteuid(), 0) and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
