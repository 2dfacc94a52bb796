"""``lorimer serve`` on an object store: killed and started on an empty directory, backed up, downloaded from."""

import io
import json
import secrets
import shutil
import subprocess
import tarfile

import httpx2
import numpy as np
import pytest

from tests.server.processes import LORIMER, Process
from tests.server.routes.conftest import datum
from tests.store.buckets import BUCKET, FaultProxy, aws, moto, seaweedfs

SERVERS = {"moto": moto, "seaweedfs": seaweedfs}
TINY = "lorimer/tiny"


@pytest.fixture(scope="module", params=["moto", "seaweedfs"])
def endpoint(request, tmp_path_factory):
    with SERVERS[request.param](tmp_path_factory.mktemp(request.param)) as url:
        yield url


@pytest.fixture
def proxy(endpoint):
    """Before the store; also sets the variables with which servers find it."""
    proxy = FaultProxy(endpoint)
    with aws(proxy.url):
        yield proxy
    proxy.close()


@pytest.fixture
def objects(proxy) -> str:
    return f"s3://{BUCKET}/{secrets.token_hex(8)}"


@pytest.fixture
def settings(objects, tmp_path) -> dict[str, object]:
    return {"objects": objects, "database": f"sqlite:///{tmp_path}/database", "snapshot_seconds": 0.01}


async def train(client, run_id: str, first: int, last: int) -> None:
    for seq_id in range(first, last + 1):
        if seq_id % 2:
            await client.train(run_id, seq_id, data=[datum(), datum()])
        else:
            await client.step(run_id, seq_id)


async def test_a_killed_server_goes_on_from_an_empty_directory(serve, settings, tmp_path):
    """The bundled model: what was trained, saved and exported before is there, and two equal runs stay equal."""
    async with serve("first", TINY, **settings) as (_, client):
        session_id = await client.session()
        runs = [await client.run(session_id, number, base_model=TINY) for number in range(2)]
        for run_id in runs:
            await train(client, run_id, 1, 6)
        path = await client.save(runs[0], 7, "kept")
        before = await client.logprobs(runs[1], 7)
        await train(client, runs[1], 8, 8)
        sampler_path = await client.save(runs[0], 8, "sampled", "save_weights_for_sampler")
    shutil.rmtree(tmp_path / "first" / "data")
    async with serve("second", TINY, **settings) as (server, client):
        await train(client, runs[0], 9, 10)
        await client.result(
            await client.ok("load_weights", {"model_id": runs[1], "seq_id": 9, "path": path, "optimizer": True})
        )
        np.testing.assert_array_equal(await client.logprobs(runs[1], 10), before)
        await train(client, runs[1], 11, 12)
        found = [await client.logprobs(run_id, seq_id) for run_id, seq_id in ((runs[0], 11), (runs[1], 13))]
        np.testing.assert_allclose(found[0], found[1], atol=1e-6)
        sampler_id = await client.sampler(session_id, 1, model_path=sampler_path)
        assert (await client.sample(sampler_id, 1)).sequences
        assert "ERROR" not in server.stderr() and "CRITICAL" not in server.stderr()


async def test_downloads_come_from_the_store_or_through_the_server(serve, settings, endpoint, tmp_path):
    for number, downloads in enumerate(("signed", "streamed")):
        async with serve(f"place-{number}", **settings, downloads=downloads) as (server, client):
            run_id = await client.run()
            await train(client, run_id, 1, 2)
            await client.save(run_id, 3, "archived")
            await client.save(run_id, 4, "exported", "save_weights_external")
            base = f"training_runs/{run_id}/checkpoints"
            urls = (await client.fetch(f"{base}/external_weights/exported/external_weights_urls"))["urls"]
            answer, again = [await client.get(f"{base}/weights/archived/archive") for _ in range(2)]
            shutil.rmtree(tmp_path / f"place-{number}" / "data" / "weights")
            (tmp_path / f"place-{number}" / "data" / "weights").mkdir(mode=0o700)
            assert {url.startswith(server.url) for url in urls.values()} == {downloads == "streamed"}
            if downloads == "streamed":
                continue  # the local copy is gone behind the server's back
            files = {name: httpx2.get(url).raise_for_status().content for name, url in urls.items()}
            assert sorted(files) == ["adapter_config.json", "adapter_model.safetensors"]
            assert json.loads(files["adapter_config.json"])["r"] == 4
            assert answer.status_code == 302
            # Built once, in the store.
            found = [httpx2.get(one.headers["location"]).raise_for_status() for one in (answer, again)]
            assert found[0].url.path == found[1].url.path and not str(found[0].url).startswith(server.url)
            with tarfile.open(fileobj=io.BytesIO(found[0].content)) as archive:
                assert sorted(archive.getnames()) == [*sorted(files), "checkpoint_complete"]
                config = archive.extractfile("adapter_config.json")
                assert config is not None and json.load(config)["r"] == 4
    async with serve("place-2", **settings) as (_, client):
        answer = await client.get(f"{base}/weights/archived/archive", follow_redirects=True)
        with tarfile.open(fileobj=io.BytesIO(answer.content)) as archive:
            assert sorted(archive.getnames()) == [*sorted(files), "checkpoint_complete"]


async def test_a_backup_holds_objects_and_is_restored_into_another_store(serve, settings, proxy, tmp_path, monkeypatch):
    async with serve("first", **settings) as (_, client):
        run_id = await client.run()
        await train(client, run_id, 1, 4)
        path = await client.save(run_id, 5, "kept")
        made = lorimer("backup", tmp_path / "copy", "--data", tmp_path / "first" / "data")
        assert made["faults"] == []
        expected = await client.logprobs(run_id, 6)
    assert list((tmp_path / "copy" / "weights").glob("*/lorimer.json"))
    elsewhere = f"s3://{BUCKET}/{secrets.token_hex(8)}"
    database = f"sqlite:///{tmp_path}/restored"
    (tmp_path / "second").mkdir()
    monkeypatch.setenv("LORIMER_OBJECTS", elsewhere)
    lorimer("restore", tmp_path / "copy", "--data", tmp_path / "second" / "data", "--database", database)
    shutil.rmtree(tmp_path / "second" / "data")
    async with serve("second", **settings | {"objects": elsewhere, "database": database}) as (_, client):
        np.testing.assert_allclose(await client.logprobs(run_id, 6), expected, atol=1e-6)
        load = {"model_id": run_id, "seq_id": 7, "path": path, "optimizer": True}
        await client.result(await client.ok("load_weights", load))
        np.testing.assert_allclose(await client.logprobs(run_id, 8), expected, atol=1e-6)


def lorimer(*arguments: object) -> dict:
    command = [*LORIMER, *map(str, arguments), "-f", "json"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr + run.stdout
    return json.loads(run.stdout)


@pytest.mark.parametrize("endpoint", ["moto"], indirect=True)
async def test_a_store_that_is_gone_for_a_while_delays_saves_and_refuses_large_submits(serve, settings, proxy):
    async with serve("first", **settings) as (_, client):
        run_id = await client.run()
        await train(client, run_id, 1, 2)
        proxy.inject("gone")
        body = {"model_id": run_id, "seq_id": 3, "path": "waits"}
        promise = await client.ok("save_weights", body)
        await train(client, run_id, 4, 6)
        large = {"model_id": run_id, "seq_id": 7, "forward_backward_input": {"data": [], "loss_fn": "cross_entropy"}}
        text = {"chunks": [{"type": "encoded_text", "tokens": [5] * 100}]}
        inputs = {name: {"data": [5] * 100, "dtype": "int64", "shape": [100]} for name in ("target_tokens",)}
        inputs["weights"] = {"data": [1.0] * 100, "dtype": "float32", "shape": [100]}
        large["forward_backward_input"]["data"] = [{"model_input": text, "loss_fn_inputs": inputs}] * 300
        refused = await client.post("forward_backward", large)
        assert refused.status_code == 503, refused.text
        assert "object store" in refused.json()["detail"]
        proxy.inject("", 0)
        await client.result(promise)
        await client.result(await client.ok("forward_backward", large))


@pytest.mark.parametrize("endpoint", ["moto"], indirect=True)
@pytest.mark.parametrize(
    ("url", "variables", "message"),
    [
        ("s3://not-there", {}, "NoSuchBucket"),
        (f"s3://{BUCKET}", {"AWS_ENDPOINT_URL": "http://127.0.0.1:1"}, "Connection refused"),
    ],
    ids=["missing", "unreachable"],
)
def test_a_store_that_cannot_be_used_is_refused_in_one_sentence(endpoint, proxy, tmp_path, url, variables, message):
    server = Process(tmp_path, "--model", "lorimer/debug", f"--set=objects={url}", variables=variables)
    assert server.process.wait(60) == 1
    last = server.stderr().strip().splitlines()
    assert len(last) == 1 and f"the object store '{url}' cannot be used" in last[0] and message in last[0], last
    server.close()
