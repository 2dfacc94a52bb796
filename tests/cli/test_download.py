"""``lorimer checkpoint download`` from a server, and its care with what servers send."""

import hashlib
import io
import json
import tarfile
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx2
import pytest

from lorimer.cli.download import check_file, directory_name, download_checkpoint, download_file, inside, unpack
from lorimer.client.connection import Connection
from lorimer.client.rest import RestClient
from lorimer.errors import CheckpointError

FILES = {"adapter_config.json", "adapter_model.safetensors"}


def names(directory):
    return {file.name for file in directory.iterdir()}


def test_every_kind_of_checkpoint(alice, trained, tmp_path):
    chosen = [trained.training, trained.sampler, trained.external]
    found = alice.json("checkpoint", "download", *chosen, "-o", tmp_path)["downloads"]
    contents = []
    for path, one in zip(chosen, found, strict=True):
        directory = tmp_path / path.removeprefix("tinker://").replace("/", "_")
        assert (one["tinker_path"], one["destination"]) == (path, str(directory))
        assert names(directory) == FILES == {file["name"] for file in one["files"]}
        for file in one["files"]:
            content = (directory / file["name"]).read_bytes()
            assert file["size_bytes"] == len(content)
            assert file["sha256"] == hashlib.sha256(content).hexdigest()
        assert json.loads((directory / "adapter_config.json").read_text("utf-8"))["r"] == 4
        contents.append((directory / "adapter_model.safetensors").read_bytes())
    assert contents[0] == contents[1] == contents[2]
    assert len(list(tmp_path.iterdir())) == 3  # nothing is left of how they came


def test_what_is_there_is_replaced_only_with_force(alice, trained, tmp_path):
    alice("checkpoint", "download", trained.sampler, "-o", tmp_path)
    (directory,) = tmp_path.iterdir()
    (directory / "notes.txt").write_text("mine", "utf-8")
    code, line = alice.refused("checkpoint", "download", trained.sampler, "-o", tmp_path)
    assert (code, "--force replaces it" in line) == (2, True)
    assert "notes.txt" in names(directory)
    shown = alice("checkpoint", "download", trained.sampler, "-o", tmp_path, "--force")
    assert str(directory) in shown and "adapter_model.safetensors" in shown
    assert names(directory) == FILES
    assert names(tmp_path) == {directory.name}


def test_checkpoint_that_is_not_there_or_of_others(alice, bob, trained, tmp_path):
    for user, path in ((alice, trained.sampler + "x"), (bob, trained.sampler), (bob, trained.external)):
        code, line = user.refused("checkpoint", "download", path, "-o", tmp_path)
        assert (code, path in line) == (4, True)
    assert names(tmp_path) == set()


def test_what_fails_is_told_and_the_rest_is_downloaded(alice, trained, tmp_path):
    gone = trained.sampler + "x"
    run = alice.run("checkpoint", "download", gone, trained.sampler, "-o", tmp_path, "-f", "json")
    found = json.loads(run.stdout)
    assert run.exit_code == 4
    assert [one["tinker_path"] for one in found["failed"]] == [gone]
    assert [one["tinker_path"] for one in found["downloads"]] == [trained.sampler]


@pytest.mark.parametrize("is_same", [True, False])
def test_interrupted_download_goes_on_if_the_file_is_the_same(alice, trained, tmp_path, is_same):
    """A byte of what is there already is changed, to see whether it was fetched again."""
    name = "adapter_model.safetensors"
    client = RestClient(base_url=alice.url, api_key=alice.key)
    answer = httpx2.get(client.get_external_weights_urls(trained.external).result().urls[name])
    content = answer.content
    place = len(content) - 400
    partial = tmp_path / f"{directory_name(trained.external)}.partial"
    partial.mkdir()
    kept = bytearray(content[:-300])
    kept[place] ^= 1
    (partial / name).write_bytes(kept)
    (partial / f"{name}.etag").write_text(answer.headers["etag"] if is_same else '"another"', "utf-8")
    (partial / "left.over").write_text("of another checkpoint", "utf-8")
    alice("checkpoint", "download", trained.external, "-o", tmp_path)
    (directory,) = tmp_path.iterdir()
    assert names(directory) == FILES
    expected = bytearray(content)
    expected[place] ^= is_same
    assert (directory / name).read_bytes() == expected


# ── a server of another make ──────────────────────────────────────────────────────────────────────────

CONTENT = bytes(range(256)) * 9000


class Server(BaseHTTPRequestHandler):
    """Serves ``CONTENT``; the first answers end early. Another path says where an archive is."""

    cuts: list[int]
    seen: list[tuple[str, str | None]]
    ranges: list[str | None]
    archive: bytes
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        self.seen.append((self.path, self.headers.get("x-api-key")))
        self.ranges.append(self.headers.get("range"))
        if self.path.endswith("/archive"):
            busy = len(self.seen) == 1
            body = b"{}" if busy else json.dumps({"url": f"http://{self.headers['Host']}/a.tar"}).encode()
            self.answer(503 if busy else 200, body, {"retry-after-ms": "1"})
        elif self.path == "/a.tar":
            self.answer(200, self.archive, {})
        else:
            start = int((self.headers.get("Range") or "bytes=0-").removeprefix("bytes=").rstrip("-"))
            self.answer(206 if start else 200, CONTENT[start:], {"ETag": '"one"'}, cut=self.cuts.pop(0))

    def answer(self, status, body, headers, cut=None):
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body[:cut])
        self.close_connection = True

    def log_message(self, *arguments):
        pass


@pytest.fixture
def stranger():
    kind = type("Stranger", (Server,), {"cuts": [], "seen": [], "ranges": [], "archive": b""})
    with ThreadingHTTPServer(("127.0.0.1", 0), kind) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        kind.url = f"http://127.0.0.1:{server.server_port}"
        yield kind
        server.shutdown()
        thread.join()


def test_broken_connection_goes_on_where_it_ended(stranger, tmp_path):
    stranger.cuts += [1_000_000, 500_000, None]
    download_file(Connection(stranger.url), f"{stranger.url}/file", tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == CONTENT
    first, second, third = stranger.ranges
    assert first is None
    assert 0 < int(second[6:-1]) < 1_000_000
    assert int(second[6:-1]) < int(third[6:-1]) < 1_500_000
    assert names(tmp_path) == {"file"}


def test_archive_that_is_still_made_and_the_key_stays_with_the_server(stranger, tmp_path):
    stranger.archive = tar_of({"adapter_config.json": b"{}", "checkpoint_complete": b""})
    client = RestClient(base_url=stranger.url, api_key="tml-secret")
    files = download_checkpoint(client, "tinker://run/weights/x", tmp_path / "x", force=False)
    assert [file.name for file in files] == ["adapter_config.json"]
    assert {key for path, key in stranger.seen if path.endswith("/archive")} == {"tml-secret"}
    assert {key for path, key in stranger.seen if path == "/a.tar"} == {None}


def tar_of(files, **attributes):
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            for attribute, value in attributes.items():
                setattr(member, attribute, value)
            tar.addfile(member, io.BytesIO(content))
    return packed.getvalue()


@pytest.mark.parametrize(
    ("files", "attributes", "message"),
    [
        ({"../outside": b"x"}, {}, "no relative path"),
        ({"/etc/outside": b"x"}, {}, "no relative path"),
        ({"a/../../outside": b"x"}, {}, "no relative path"),
        ({"link": b""}, {"type": tarfile.SYMTYPE, "linkname": "/etc/passwd"}, "is no file"),
        ({"link": b""}, {"type": tarfile.LNKTYPE, "linkname": "adapter_config.json"}, "is no file"),
        ({"pipe": b""}, {"type": tarfile.FIFOTYPE}, "is no file"),
        ({"archive.tar": b"x"}, {}, "would replace itself"),
    ],
)
def test_archive_that_reaches_outside_is_refused(tmp_path, files, attributes, message):
    directory = tmp_path / "inside"
    directory.mkdir()
    (directory / "archive.tar").write_bytes(tar_of(files, **attributes))
    with pytest.raises(CheckpointError, match=message):
        unpack(directory / "archive.tar", directory)
    assert names(tmp_path) == {"inside"}
    assert names(directory) == {"archive.tar"}


def test_torn_archive_is_refused(tmp_path):
    (tmp_path / "archive.tar").write_bytes(tar_of({"a": b"x" * 5000})[:3000])
    with pytest.raises(CheckpointError, match="cannot be read"):
        unpack(tmp_path / "archive.tar", tmp_path)
    assert not (tmp_path / "archive.tar").exists()


@pytest.mark.parametrize("name", ["", "/a", "../a", "a/../../b", "a\\b", "a\0b", "."])
def test_names_stay_inside(tmp_path, name):
    with pytest.raises(CheckpointError, match="no relative path"):
        inside(tmp_path, name)


def test_names_of_files_in_folders(tmp_path):
    assert inside(tmp_path, "a/b.json") == tmp_path / "a" / "b.json"


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.safetensors", b""),
        ("a.safetensors", (5).to_bytes(8, "little") + b"{}"),
        ("a.safetensors", (2).to_bytes(8, "little") + b"[]"),
        ("a.safetensors", (47).to_bytes(8, "little") + b'{"w":{"dtype":"U8","data_offsets":[0,9],"shape":9}}'),
        ("a.json", b"{"),
    ],
)
def test_torn_files_are_noticed(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(CheckpointError):
        check_file(tmp_path / name)
