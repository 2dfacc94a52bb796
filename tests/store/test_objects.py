"""The protocol of objects, the same on a data directory, a shared directory, moto and SeaweedFS, and under faults."""

import asyncio
import hashlib
import os
import secrets
import time
from datetime import timedelta

import httpx2
import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lorimer.errors import CheckpointError, NameTaken, StorageError
from lorimer.store import DataDirectory, tokenizers
from lorimer.store.manifests import MANIFEST, is_whole
from lorimer.store.object_store import PART_BYTES, StoredObjects
from lorimer.store.objects import DirectoryObjects, Objects, check_url, open_objects
from lorimer.store.retention import sweep_objects
from tests.store.buckets import BUCKET, FaultProxy, aws, moto, open_at, seaweedfs

KINDS = ["directory", "file", "moto", pytest.param("seaweedfs", marks=pytest.mark.service)]


@pytest.fixture(scope="module")
def endpoint(request, tmp_path_factory):
    """The URL of a server that speaks S3; empty for directories."""
    kind = request.param
    if kind in ("directory", "file"):
        yield kind, ""
        return
    with {"moto": moto, "seaweedfs": seaweedfs}[kind](tmp_path_factory.mktemp(kind)) as url:
        yield kind, url


@pytest.fixture
def objects(endpoint, tmp_path) -> Objects:
    kind, url = endpoint
    if kind == "directory":
        return DirectoryObjects(DataDirectory(tmp_path / "data"))
    if kind == "file":
        return asyncio.run(open_objects(f"file://{tmp_path}/shared", DataDirectory(tmp_path / "data")))
    return asyncio.run(open_at(url, secrets.token_hex(8)))


def write_directory(path, files: dict[str, bytes]):
    """What an engine writes: files and a manifest."""
    path.mkdir(parents=True)
    for name, data in files.items():
        (path / name).write_bytes(data)
    facts = {name: {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()} for name, data in files.items()}
    manifest = {"format": 1, "files": facts, "checksum": ""}
    manifest["checksum"] = hashlib.sha256(msgspec.json.encode(manifest)).hexdigest()
    (path / MANIFEST).write_bytes(msgspec.json.encode(manifest))
    return path


async def names_of(objects, prefix="weights/", older_than=timedelta(0)):
    return {name async for name in objects.names(prefix, older_than)}


everywhere = pytest.mark.parametrize("endpoint", KINDS, indirect=True)
on_moto = pytest.mark.parametrize("endpoint", ["moto"], indirect=True)


# ── the protocol ──────────────────────────────────────────────────────────────────────────────────────


@everywhere
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    steps=st.lists(
        st.tuples(
            st.sampled_from(["put", "replace", "get", "delete", "list"]), st.integers(0, 3), st.binary(max_size=50)
        ),
        max_size=12,
    )
)
def test_objects_are_a_dictionary_that_refuses_names_twice(objects, steps):
    """Any sequence of calls answers like a dictionary."""

    async def run():
        kept: dict[str, bytes] = {}
        salt = secrets.token_hex(8)
        for step, number, data in steps:
            name = f"blobs/{salt}-{number}"
            match step:
                case "put" if name in kept:
                    with pytest.raises(NameTaken):
                        await objects.put(name, data)
                case "put" | "replace":
                    await objects.put(name, data, replace=step == "replace")
                    kept[name] = data
                case "get" if name in kept:
                    assert await objects.get(name) == kept[name]
                case "get":
                    with pytest.raises(CheckpointError, match="is missing"):
                        await objects.get(name)
                case "delete":
                    await objects.delete([name])
                    kept.pop(name, None)
                case "list":
                    assert {one for one in await names_of(objects, "blobs/") if salt in one} == set(kept)

    asyncio.run(run())


@everywhere
async def test_a_directory_comes_back_whole(objects, tmp_path):
    files = {"a.json": b"{}", "empty": b"", "large.bin": os.urandom(2 * PART_BYTES + 17)}
    source = write_directory(tmp_path / "data" / "weights" / "abc", files)
    facts = await objects.upload("weights/abc", source)
    assert {name: file["size"] for name, file in facts.items()} == {name: len(data) for name, data in files.items()}
    assert await objects.upload("weights/abc", source) == facts  # a second call changes nothing
    assert await objects.has_all("weights/abc")
    assert await names_of(objects) == {"weights/abc"}
    assert await names_of(objects, older_than=timedelta(days=1)) == set()
    await objects.fetch("weights/abc", tmp_path / "copy")
    assert {path.name: path.read_bytes() for path in (tmp_path / "copy").iterdir() if path.name != MANIFEST} == files
    assert is_whole(tmp_path / "copy")
    await objects.delete(["weights/abc", "weights/never-there"])
    assert await names_of(objects) == set()
    assert not await objects.has_all("weights/abc")
    with pytest.raises(CheckpointError, match="missing"):
        await objects.fetch("weights/abc", tmp_path / "again")


@everywhere
async def test_one_of_many_creators_wins(objects):
    outcomes = await asyncio.gather(
        *(objects.put("blobs/race", f"{number}".encode()) for number in range(32)), return_exceptions=True
    )
    assert [type(outcome) for outcome in outcomes].count(NameTaken) == 31
    assert await objects.get("blobs/race") == f"{outcomes.index(None)}".encode()


@pytest.mark.parametrize("endpoint", KINDS[1:], indirect=True)
@pytest.mark.parametrize("harm", ["flipped", "torn", "lost", "manifest"])
async def test_a_damaged_object_is_named(objects: StoredObjects, tmp_path, harm):
    files = {"a.bin": os.urandom(1000), "b.bin": os.urandom(1000)}
    source = write_directory(tmp_path / "data" / "snapshots" / "abc", files)
    await objects.upload("snapshots/abc", source)
    name = "snapshots/abc/" + (MANIFEST if harm == "manifest" else "b.bin")
    data = await objects.get(name)
    await objects.delete([name[:9] + "-never"])
    if harm == "lost":
        await objects._delete(name)
    else:
        changed = data[:-1] if harm == "torn" else data[:500] + bytes([data[500 % len(data)] ^ 1]) + data[501:]
        changed = data[:20] + bytes([data[20] ^ 1]) + data[21:] if harm == "manifest" else changed
        await objects.put(name, changed, replace=True)
    with pytest.raises(CheckpointError, match=name.replace(".", r"\.")):
        await objects.fetch("snapshots/abc", tmp_path / "copy")
    assert not list(tmp_path.glob("copy*"))
    assert await objects.has_all("snapshots/abc") == (harm == "flipped")  # which does not read the files


@pytest.mark.parametrize("endpoint", ["file"], indirect=True)
async def test_a_manifest_cannot_name_files_elsewhere(objects, tmp_path):
    source = write_directory(tmp_path / "source", {"a": b"1"})
    facts = {"../../escaped": {"size": 1, "sha256": hashlib.sha256(b"1").hexdigest()}}
    manifest = {"files": facts, "checksum": ""}
    manifest["checksum"] = hashlib.sha256(msgspec.json.encode(manifest)).hexdigest()
    (source / MANIFEST).write_bytes(msgspec.json.encode(manifest))
    await objects.put(f"weights/a/{MANIFEST}", msgspec.json.encode(manifest))
    with pytest.raises(CheckpointError, match="is damaged"):
        await objects.fetch("weights/a", tmp_path / "copy")


@everywhere
async def test_only_old_orphans_are_swept(objects, tmp_path):
    for name in ("named", "orphan"):
        await objects.upload(f"weights/{name}", write_directory(tmp_path / "source" / name, {"a": b"1"}))
        await objects.put(f"blobs/{name}", b"1")
    (tmp_path / "archive").write_bytes(b"1")
    archives = [] if objects.is_local else ["archives/named"]  # which no row names
    for name in archives:
        await objects.put_file(f"{name}/1.tar", tmp_path / "archive")

    async def known():
        return {"named"}

    assert await sweep_objects(objects, known) == []
    swept = sorted(await sweep_objects(objects, known, timedelta(0)))
    assert swept == [*archives, "blobs/orphan", "weights/orphan"]
    assert not await names_of(objects, "archives/")
    assert await names_of(objects) | await names_of(objects, "blobs/") == {"weights/named", "blobs/named"}


@everywhere
async def test_tokenizer_files_are_found_by_their_model(objects, tmp_path):
    (tmp_path / "tokenizer.json").write_bytes(b"{}")
    (tmp_path / "weights.bin").write_bytes(b"not a tokenizer's")
    await tokenizers.publish(objects, "org/model", tmp_path)
    (tmp_path / "vocab.txt").write_bytes(b"a")
    listing = await tokenizers.publish(objects, "org/model", tmp_path)
    assert await tokenizers.find(objects, "org/model") == listing
    assert {name: await tokenizers.read(objects, file) for name, file in listing.items()} == {
        "tokenizer.json": b"{}",
        "vocab.txt": b"a",
    }
    copies = [await tokenizers.fetch(objects, "org/model", tmp_path / "elsewhere") for _ in range(2)]
    assert copies[0] == copies[1]
    assert {path.name: path.read_bytes() for path in copies[0].iterdir()} == {
        name: (tmp_path / name).read_bytes() for name in listing
    }
    await objects.put(f"tokenizers/files/{listing['vocab.txt']['sha256']}", b"b", replace=True)
    with pytest.raises(CheckpointError, match="is damaged"):
        await tokenizers.read(objects, listing["vocab.txt"])


@pytest.mark.parametrize("endpoint", KINDS[2:], indirect=True)
async def test_a_signed_url_needs_no_credentials(objects):
    await objects.put("blobs/a", b"content")
    url = await objects.sign("blobs/a", 60)
    assert httpx2.get(url).content == b"content"


# ── faults ────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def proxy(endpoint):
    proxy = FaultProxy(endpoint[1])
    yield proxy
    proxy.close()


@on_moto
@pytest.mark.service
@pytest.mark.parametrize("fault", ["slow", "500", "503", "cut", "lost", "gone"])
async def test_a_passing_fault_is_not_seen(proxy, tmp_path, fault):
    objects = await open_at(proxy.url, secrets.token_hex(8))
    source = write_directory(tmp_path / "source", {"a.bin": os.urandom(PART_BYTES + 5)})
    proxy.inject(fault, 2)
    await objects.put("blobs/a", b"content")
    proxy.inject(fault, 2)
    assert await objects.get("blobs/a") == b"content"
    proxy.inject(fault, 2)
    await objects.upload("weights/a", source)
    proxy.inject(fault, 2)
    await objects.fetch("weights/a", tmp_path / "copy")
    assert is_whole(tmp_path / "copy")
    proxy.inject(fault, 2)
    assert await names_of(objects) == {"weights/a"}
    proxy.inject(fault, 2)
    await objects.delete(["weights/a"])
    assert await names_of(objects) == set()


@on_moto
@pytest.mark.service
@pytest.mark.parametrize("fault", ["500", "503", "gone", "slow"])
async def test_a_lasting_fault_is_a_storage_error_that_says_why(proxy, tmp_path, fault):
    objects = await open_at(proxy.url, secrets.token_hex(8), request_seconds=0.3)
    source = write_directory(tmp_path / "source", {"a.bin": b"1"})
    proxy.inject(fault)
    reason = {"500": "500 Internal Server Error", "503": "SlowDown: Please reduce your request rate"}.get(fault, "")
    for call in (objects.put("blobs/a", b"1"), objects.get("blobs/a"), objects.upload("weights/a", source)):
        with pytest.raises(StorageError, match=f"the object store 's3://.*cannot be used: .*{reason}"):
            await call
    with pytest.raises(StorageError):
        await names_of(objects)
    proxy.inject("", 0)
    await objects.upload("weights/a", source)
    assert await objects.has_all("weights/a")


@on_moto
async def test_a_byte_flipped_on_the_way_is_fetched_again(proxy, tmp_path):
    objects = await open_at(proxy.url, secrets.token_hex(8))
    await objects.upload("weights/a", write_directory(tmp_path / "source", {"a.bin": os.urandom(1000)}))
    proxy.inject("flip", 1, "a.bin")
    await objects.fetch("weights/a", tmp_path / "copy")
    proxy.inject("flip", 10, "a.bin")
    with pytest.raises(CheckpointError, match=r"'weights/a/a\.bin' is damaged: it has 1000 bytes with SHA-256"):
        await objects.fetch("weights/a", tmp_path / "second")


@on_moto
async def test_an_upload_that_is_cut_short_is_not_complete(proxy, tmp_path):
    objects = await open_at(proxy.url, secrets.token_hex(8))
    source = write_directory(tmp_path / "source", {"a.bin": b"1", "b.bin": b"2"})
    proxy.inject("500", only="b.bin")
    with pytest.raises(StorageError):
        await objects.upload("weights/a", source)
    assert not await objects.has_all("weights/a")
    assert await names_of(objects) == {"weights/a"}  # an orphan, until it is uploaded again or swept


# ── what is refused at start ──────────────────────────────────────────────────────────────────────────


class Careless(FaultProxy):
    """A gateway that ignores conditions."""

    def take(self, request: str) -> str:
        return "unconditional"


@on_moto
async def test_a_store_that_ignores_conditions_is_refused(endpoint, monkeypatch):
    from tests.store import buckets

    proxy = Careless(endpoint[1])
    forward = buckets._Handler._forward

    def without_condition(self):
        del self.headers["if-none-match"]
        forward(self)

    monkeypatch.setattr(buckets._Handler, "do_PUT", without_condition)
    with pytest.raises(StorageError, match="ignores conditional puts: 2 of 2 creators of one name succeeded"):
        await open_at(proxy.url, "p")
    proxy.close()


@on_moto
async def test_a_missing_bucket_and_an_unreachable_server_are_refused(endpoint):
    with aws(endpoint[1]), pytest.raises(StorageError, match="NoSuchBucket: The specified bucket does not exist"):
        await open_objects("s3://not-there", None)
    began = time.monotonic()
    with aws("http://127.0.0.1:1"), pytest.raises(StorageError, match=f"'s3://{BUCKET}' cannot be used.*refused"):
        await open_objects(f"s3://{BUCKET}", None)
    assert time.monotonic() - began < 10


@pytest.mark.service
@pytest.mark.parametrize("endpoint", ["seaweedfs"], indirect=True)
async def test_a_wrong_key_is_refused(endpoint, monkeypatch):
    with aws(endpoint[1]):
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "wrong")
        with pytest.raises(StorageError, match=r"cannot be used: .*InvalidAccessKeyId"):
            await open_objects(f"s3://{BUCKET}/p", None)


@pytest.mark.parametrize("url", ["gs://bucket", "s3://", "/a/path", "S3://bucket"])
def test_other_urls_are_refused(url):
    with pytest.raises(ValueError, match="'s3://BUCKET/PREFIX' or 'file:///DIRECTORY' is accepted"):
        check_url(url)
