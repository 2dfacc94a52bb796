"""Downloads: signed addresses, archives, exports, encryption."""

import io
import json
import tarfile
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from urllib.parse import urlsplit

import httpx2
import numpy as np
import pyrage  # type: ignore[import-untyped]
import pytest
from safetensors.numpy import load

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def exported(client, name="x", **fields):
    run_id = await client.run()
    await client.train(run_id, 1)
    await client.step(run_id, 2)
    body = {"model_id": run_id, "seq_id": 3, "path": name, **fields}
    return run_id, await client.result(await client.ok("save_weights_external", body))


async def urls_of(client, run_id, name="x", **options):
    return await client.fetch(
        f"training_runs/{run_id}/checkpoints/external_weights/{name}/external_weights_urls", **options
    )


async def anonymous(server, url, **options):
    """What somebody without a key gets."""
    transport = httpx2.ASGITransport(app=server.app, raise_app_exceptions=False)
    async with httpx2.AsyncClient(transport=transport) as http:
        return await http.get(url, **options)


async def test_export_has_an_address_for_each_file(server, ada):
    run_id, result = await exported(ada)
    assert result["path"] == f"tinker://{run_id}/external_weights/x"
    answer = await urls_of(ada, run_id)
    assert set(answer["urls"]) == {"adapter_config.json", "adapter_model.safetensors"}
    expires = datetime.fromisoformat(answer["expires"])
    assert timedelta(minutes=50) < expires - datetime.now(UTC) <= timedelta(hours=1)
    config = await anonymous(server, answer["urls"]["adapter_config.json"])
    assert json.loads(config.content)["r"] == 4
    weights = await anonymous(server, answer["urls"]["adapter_model.safetensors"])
    assert int(weights.headers["content-length"]) == len(weights.content)
    tensors = load(weights.content)
    assert any(np.any(tensor) for name, tensor in tensors.items() if "lora_B" in name)
    part = await anonymous(server, answer["urls"]["adapter_model.safetensors"], headers={"range": "bytes=0-7"})
    assert (part.status_code, part.content) == (206, weights.content[:8])


PROXIES = {
    "none": ({}, "http://127.0.0.1:8000/api/"),
    "TLS": ({"x-forwarded-proto": "https"}, "https://127.0.0.1:8000/api/"),
    "prefix": ({"x-forwarded-prefix": "/some/prefix/"}, "http://127.0.0.1:8000/some/prefix/api/"),
    "nonsense": ({"x-forwarded-proto": "ftp", "x-forwarded-prefix": "//evil.test/"}, "http://127.0.0.1:8000/api/"),
}


@pytest.mark.parametrize(("headers", "beginning"), PROXIES.values(), ids=PROXIES)
async def test_addresses_are_those_of_the_request(server, ada, headers, beginning):
    run_id = await ada.run()
    await ada.save(run_id, 1, "x", kind="save_weights_external")
    url = (await urls_of(ada, run_id, headers=headers))["urls"]["adapter_config.json"]
    assert url.startswith(beginning)
    assert (await anonymous(server, url.replace(beginning, "http://127.0.0.1:8000/api/"))).status_code == 200


async def test_changed_and_expired_addresses_are_refused(server, ada):
    run_id, _ = await exported(ada)
    url = (await urls_of(ada, run_id))["urls"]["adapter_config.json"]
    for changed in (
        url.replace("adapter_config.json", "adapter_model.safetensors"),
        url.replace("adapter_config.json", "../../../lorimer.db"),
        url.replace("signature=", "signature=0"),
        url.replace("expires=1", "expires=9"),
        url.partition("?")[0],
    ):
        response = await anonymous(server, changed)
        assert response.status_code in (403, 404), changed
        if response.status_code == 403:
            assert response.json()["code"] == "forbidden"
    context = server.context
    path = urlsplit(url).path
    old, _ = context.signer.sign_download(path, context.now() - timedelta(hours=2), 3600)
    assert (await anonymous(server, f"http://127.0.0.1:8000{old}")).status_code == 410
    assert (await anonymous(server, url)).status_code == 200


async def test_address_ends_with_its_checkpoint(server, ada):
    run_id, _ = await exported(ada)
    url = (await urls_of(ada, run_id))["urls"]["adapter_config.json"]
    await ada.send("DELETE", f"training_runs/{run_id}/checkpoints/external_weights/x")
    assert (await anonymous(server, url)).status_code == 410
    await ada.save(run_id, 4, "x", kind="save_weights_external")
    assert (await anonymous(server, url)).status_code == 410, "another checkpoint of the name is not it"


@pytest.mark.parametrize("kind", ["save_weights", "save_weights_for_sampler"])
async def test_archive_is_a_redirect_to_a_tar(server, ada, kind):
    run_id = await ada.run()
    path = await ada.save(run_id, 1, "a", kind=kind)
    segment = path.split("/")[-2]
    response = await ada.get(f"training_runs/{run_id}/checkpoints/{segment}/a/archive")
    assert response.status_code == 302
    expires = parsedate_to_datetime(response.headers["expires"])
    assert timedelta(minutes=50) < expires - datetime.now(UTC) <= timedelta(hours=1)
    fetched = await anonymous(server, response.headers["location"])
    assert int(fetched.headers["content-length"]) == len(fetched.content)
    with tarfile.open(fileobj=io.BytesIO(fetched.content), mode="r") as archive:
        assert archive.getnames() == ["adapter_config.json", "adapter_model.safetensors", "checkpoint_complete"]
        assert load(archive.extractfile("adapter_model.safetensors").read())


async def test_only_exports_have_addresses_and_only_others_archives(ada):
    run_id, _ = await exported(ada)
    await ada.save(run_id, 4, "w")
    urls = await ada.get(f"training_runs/{run_id}/checkpoints/weights/w/external_weights_urls")
    assert urls.status_code == 400
    assert "external_weights" in urls.json()["detail"]
    assert (await ada.get(f"training_runs/{run_id}/checkpoints/external_weights/x/archive")).status_code == 400


async def test_exports_are_not_loaded_or_sampled(ada):
    session_id = await ada.session()
    run_id, result = await exported(ada)
    body = {"model_id": run_id, "seq_id": 4, "path": result["path"], "optimizer": False}
    assert (await ada.post("load_weights", body)).status_code == 400
    sampler = {"session_id": session_id, "sampling_session_seq_id": 0, "model_path": result["path"]}
    assert (await ada.post("create_sampling_session", sampler)).status_code == 400


SSH_KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIHsKLqeplhpW+uObz5dvMgjz1OxfM/XXUB+VHtZ6isGN ada@laptop"


async def test_encrypted_export_opens_with_the_key_only(server, ada):
    identity = pyrage.x25519.Identity.generate()
    recipients = [str(identity.to_public()), SSH_KEY]
    run_id, _ = await exported(ada, age_encryption_recipients=recipients)
    plain = await ada.save(run_id, 4, "plain", kind="save_weights_external")
    assert plain
    urls = (await urls_of(ada, run_id))["urls"]
    assert set(urls) == {"adapter_config.json.age", "adapter_model.safetensors.age"}
    fetched = await anonymous(server, urls["adapter_model.safetensors.age"])
    assert int(fetched.headers["content-length"]) == len(fetched.content)
    opened = pyrage.decrypt(fetched.content, [identity])
    reference = await anonymous(server, (await urls_of(ada, run_id, "plain"))["urls"]["adapter_model.safetensors"])
    assert opened == reference.content
    with pytest.raises(pyrage.DecryptError):
        pyrage.decrypt(fetched.content, [pyrage.x25519.Identity.generate()])
    listed = (await ada.fetch(f"training_runs/{run_id}/checkpoints"))["checkpoints"]
    assert json.loads(listed[-1]["user_metadata"]["age_recipients"]) == recipients


@pytest.mark.parametrize(
    ("recipients", "status", "word"),
    [(["age1nonsense"], 400, "age1nonsense"), (["ssh-dss x"], 400, "ssh-dss"), ([SSH_KEY] * 11, 413, "11")],
    ids=["no key", "no key of SSH", "too many"],
)
async def test_recipients_must_be_keys(ada, recipients, status, word):
    run_id = await ada.run()
    body = {"model_id": run_id, "seq_id": 1, "path": "x", "age_encryption_recipients": recipients}
    response = await ada.post("save_weights_external", body)
    assert response.status_code == status
    assert word in response.json()["detail"]


async def test_published_export_is_downloaded_by_others(server, ada, bob):
    run_id, _ = await exported(ada)
    path = f"training_runs/{run_id}/checkpoints/external_weights/x"
    assert (await bob.get(f"{path}/external_weights_urls")).status_code == 404
    await ada.post(f"{path}/publish")
    urls = (await urls_of(bob, run_id))["urls"]
    assert (await anonymous(server, urls["adapter_config.json"])).status_code == 200
