"""Flags, credentials, models and telemetry."""

import jwt
import pytest

from lorimer.store import audit, telemetry

from .conftest import MODEL

pytestmark = pytest.mark.asyncio(loop_scope="session")

FLAGS = {
    "0.18.2": {},
    "0.22.0": {"use_pyqwest_transport": False},
    "0.24.1": {"create_model_via_load_weights": True, "pjwt_auth_enabled": True},
    "0.36.0": {
        "create_model_via_load_weights": True,
        "proto_compress_fwdbwd": True,
        "sample_use_retrieve_futures": True,
        "sample_join_sampling_session": True,
        "custom_loss_server_side": True,
        "pjwt_auth_enabled": True,
    },
}


@pytest.mark.parametrize(("release", "flags"), FLAGS.items(), ids=FLAGS)
async def test_client_config_switches_on_what_a_release_has(ada, release, flags):
    config = await ada.release(release).ok("client/config", {"sdk_version": release})
    assert {name: value for name, value in config.items() if name in flags} == flags
    assert config["pjwt_auth_enabled"] is flags.get("pjwt_auth_enabled", False)


async def test_dynamic_config_switches_on_cancelling(ada):
    assert (await ada.ok("client/dynamic_config", {"sdk_version": "0.36.0"}))["sample_cancel_enabled"] is True
    assert "sample_cancel_enabled" not in await ada.ok("client/dynamic_config", {"sdk_version": "0.25.0"})


async def test_token_stands_for_its_key_and_ends_with_it(server):
    key, secret = await server.context.credentials.create("carol", "one")
    carol = type(server.ada)(server.ada.http, key.user_id, headers={"x-api-key": secret})
    token = (await carol.ok("auth/token", {}))["jwt"]
    assert jwt.decode(token, options={"verify_signature": False})["sub"] == f"tml:user:{key.user_id}"
    carol.headers["x-api-key"] = token
    session_id = await carol.session()
    assert (await carol.fetch("sessions"))["sessions"] == [session_id]
    assert (await carol.fetch("auth/apikey/me"))["key_id"] == key.key_id
    assert (await carol.send("DELETE", "auth/apikey/me")).status_code == 204
    for credential in (token, secret):
        carol.headers["x-api-key"] = credential
        assert (await carol.get("sessions")).status_code == 401
    entries = await server.context.store.read(audit.entries, user_id=key.user_id)
    assert [entry.event for entry in entries] == ["key_revoked", "session_created"]
    assert secret not in str(entries)


async def test_key_is_described_without_its_secret(server, ada):
    described = await ada.fetch("auth/apikey/me")
    assert described["name"] == "ada's laptop"
    assert described["note"] == "for tests"
    assert described["details"] == {"org_details": {"name": "lorimer"}, "user_details": {"email": "ada"}}
    assert server.secrets["ada"] not in str(described)


async def test_capabilities_name_the_models(ada):
    await ada.run()
    [model] = (await ada.fetch("get_server_capabilities"))["supported_models"]
    assert model == {"model_name": MODEL, "max_context_length": 512, "trainable": True, "sampleable": True}


async def test_telemetry_is_kept_without_secrets(server, ada):
    session_id = await ada.session()
    events = [
        {"event": "SESSION_START", "event_id": "1", "severity": "INFO"},
        {"event": "UNHANDLED_EXCEPTION", "traceback": f"key {server.secrets['ada']}", "headers": {"X-API-Key": "k"}},
        {"event": "NOT_ONE_WE_KNOW", "other": 3},
        "not an event",
    ]
    body = {"events": events, "platform": "Linux", "sdk_version": "0.36.0", "session_id": session_id}
    assert await ada.ok("telemetry", body) == {"status": "accepted"}
    kept = await server.context.store.read(telemetry.events, session_id)
    assert [event["event"] for event in kept] == ["SESSION_START", "UNHANDLED_EXCEPTION", "NOT_ONE_WE_KNOW"]
    assert server.secrets["ada"] not in str(kept)
    assert kept[1]["headers"] == {"X-API-Key": "[removed]"}


async def test_telemetry_of_another_users_session_is_dropped(server, ada, bob):
    session_id = await ada.session()
    body = {"events": [{"event": "SESSION_START"}], "session_id": session_id}
    assert await bob.ok("telemetry", body) == {"status": "accepted"}
    assert await server.context.store.read(telemetry.events, session_id) == []


@pytest.mark.parametrize(
    "content",
    [b"", b"[]", b"{", b'{"events": 3}', b'{"events": [], "session_id": "sessionless-1"}', b"\xff" * 100],
    ids=["nothing", "a list", "torn", "no list", "no session", "no text"],
)
async def test_odd_telemetry_is_accepted(ada, content):
    response = await ada.post("telemetry", content=content, headers={"content-type": "application/json"})
    assert (response.status_code, response.json()) == (200, {"status": "accepted"})


async def test_openapi_needs_a_key(server, ada):
    assert (await server.ada.http.get("/openapi.json")).status_code == 401
    document = (await ada.http.get("/openapi.json", headers=ada.headers)).json()
    assert document["paths"]["/api/v1/create_session"]["post"]["requestBody"]["required"] is True
