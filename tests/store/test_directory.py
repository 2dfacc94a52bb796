"""The data directory: modes, refusals, the lock and its owner's death, and that nothing outside is ever removed."""

import os
import signal
import socket
import stat
import subprocess
import sys

import pytest

from lorimer.errors import StorageError
from lorimer.store import DataDirectory, Store, blobs

HOLD_THE_LOCK = """
import sys, time
from lorimer.store import DataDirectory
DataDirectory(sys.argv[1]).lock()
print("locked", flush=True)
time.sleep(60)
"""


@pytest.fixture
def directory(tmp_path):
    return DataDirectory(tmp_path / "data")


def mode(path):
    return stat.S_IMODE(path.lstat().st_mode)


def test_everything_is_private_whatever_the_umask(tmp_path):
    before = os.umask(0)
    try:
        made = DataDirectory(tmp_path / "new" / "data")
        made.lock()
        assert len(made.secret) == 32
    finally:
        os.umask(before)
    made.unlock()
    for path in (made.path, made.weights, made.snapshots, made.blobs):
        assert mode(path) == 0o700
    assert mode(made.path / "secret") == mode(made.path / "lock") == 0o600


def test_the_secret_stays(directory, tmp_path):
    assert DataDirectory(tmp_path / "data").secret == directory.secret
    assert DataDirectory(tmp_path / "other").secret != directory.secret


def test_a_torn_secret_is_named(directory):
    (directory.path / "secret").write_bytes(b"short")
    with pytest.raises(StorageError, match="has 5 bytes instead of 32"):
        _ = directory.secret


def test_a_directory_everybody_can_write_to_is_refused(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data").chmod(0o777)
    with pytest.raises(StorageError, match=r"every user can write to .*data'; take that away with chmod o-w"):
        DataDirectory(tmp_path / "data")


@pytest.mark.parametrize("name", ["data", "data/weights", "data/blobs"])
def test_a_symbolic_link_is_refused(tmp_path, name):
    DataDirectory(tmp_path / "data")
    (tmp_path / "elsewhere").mkdir()
    place = tmp_path / name
    place.rename(tmp_path / "moved")
    place.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StorageError, match="is a symbolic link; name the directory itself"):
        DataDirectory(tmp_path / "data")


def test_a_file_in_the_way_is_named(tmp_path):
    (tmp_path / "data").write_text("a file")
    with pytest.raises(StorageError, match="data' is not a directory"):
        DataDirectory(tmp_path / "data")
    with pytest.raises(StorageError, match="data' cannot be a data directory: File exists"):
        DataDirectory(tmp_path / "data" / "below")


def test_a_second_holder_is_told_who_the_first_is(directory, tmp_path):
    directory.lock()
    second = DataDirectory(tmp_path / "data")
    with pytest.raises(StorageError, match=f"is in use by process {os.getpid()} on {socket.gethostname()}"):
        second.lock()
    directory.unlock()
    second.lock()
    second.unlock()


def test_the_lock_of_a_killed_process_is_taken_over(directory):
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD_THE_LOCK, str(directory.path)], stdout=subprocess.PIPE, env=dict(os.environ)
    )
    with holder:
        assert holder.stdout.readline() == b"locked\n"
        with pytest.raises(StorageError, match=f"in use by process {holder.pid} "):
            directory.lock()
        holder.send_signal(signal.SIGKILL)
    directory.lock()
    assert (directory.path / "lock").read_text().startswith(f"process {os.getpid()} ")
    directory.unlock()


def test_the_lock_file_is_not_followed_elsewhere(directory, tmp_path):
    (tmp_path / "precious").write_text("precious")
    (directory.path / "lock").symlink_to(tmp_path / "precious")
    with pytest.raises(StorageError, match="lock' cannot be opened"):
        directory.lock()
    assert (tmp_path / "precious").read_text() == "precious"


def test_new_directories_are_random_and_not_there_yet(directory):
    made = {directory.new_weights_directory() for _ in range(100)} | {directory.new_snapshot_directory()}
    assert len(made) == 101
    assert not any(path.exists() for path in made)
    assert {path.parent for path in made} == {directory.weights, directory.snapshots}


@pytest.mark.parametrize(
    "path",
    [
        ".",
        "..",
        "weights",
        "lorimer.db",
        "secret",
        "weights/..",
        "weights/.",
        "weights/../secret",
        "weights/a/b",
        "weights/a..b",
        "/etc/passwd",
        "weights/-rf",
        "weights/a b",
        "weights/a\0b",
        "",
    ],
)
def test_only_entries_of_the_three_places_are_removed(directory, path):
    (directory.weights / "a").mkdir()
    (directory.path / "secret").write_text("s")
    with pytest.raises(StorageError, match="is not removed: only entries of weights, snapshots, blobs"):
        directory.remove(path)
    assert (directory.path / "secret").exists()
    assert (directory.weights / "a").exists()


def test_removing_takes_the_link_and_not_what_it_points_to(directory, tmp_path):
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "file").write_text("precious")
    (directory.weights / "link").symlink_to(tmp_path / "precious")
    (directory.weights / "full").mkdir()
    (directory.weights / "full" / "link").symlink_to(tmp_path / "precious")
    directory.remove(directory.weights / "link")
    directory.remove("weights/full")
    directory.remove("weights/never-there")
    assert os.listdir(directory.weights) == []
    assert (tmp_path / "precious" / "file").exists()


def test_the_sweep_removes_what_the_database_does_not_know(directory):
    for name in ("weights/known", "weights/orphan", "weights/known.tmp-12", "snapshots/s1", "snapshots/s2"):
        (directory.path / name).mkdir()
        (directory.path / name / "file").write_text("x")
    (directory.blobs / "b1-1-00").write_text("x")
    (directory.blobs / "b2-1-00.tmp-ab").write_text("x")
    removed = directory.sweep_orphans({"known", "s1", "b1-1-00"})
    assert removed == ["known.tmp-12", "orphan", "s2", "b2-1-00.tmp-ab"]
    left = {str(path.relative_to(directory.path)) for path in directory.path.glob("*/*")}
    assert left == {"weights/known", "snapshots/s1", "blobs/b1-1-00"}


def test_free_bytes_are_those_of_the_file_system(directory):
    found = os.statvfs(directory.path)
    assert abs(directory.free_bytes() - found.f_bavail * found.f_frsize) < 2**30


def test_files_stay_while_a_backup_holds_them_and_go_when_the_last_one_ends(directory):
    kept, gone = directory.weights / "a", directory.blobs / "b"
    kept.mkdir()
    (kept / "file").write_bytes(b"weights")
    gone.write_bytes(b"payload")
    directory.hold_files()
    directory.hold_files()
    directory.remove(kept)
    directory.remove(gone)
    directory.release_files()
    assert (kept / "file").exists() and gone.exists()
    directory.release_files()
    assert not kept.exists() and not gone.exists()
    gone.write_bytes(b"another")
    directory.remove(gone)
    assert not gone.exists(), "nothing is deferred without a hold"


def test_blobs_stay_while_a_backup_holds_them(tmp_path):
    directory = DataDirectory(tmp_path / "data")
    store = Store.open(None, directory)
    try:
        store.write_now(blobs.put, "owner", "payload", bytes(300_000))
        (file,) = directory.blobs.iterdir()
        directory.hold_files()
        store.write_now(blobs.drop, ["owner"])
        assert file.exists()
        directory.release_files()
        assert not file.exists()
    finally:
        store.close()
