"""Sessions, what the server keeps, and who may ask: over HTTP with a real server."""

import asyncio
import os
import pickle
from datetime import UTC, datetime, timedelta

import httpx2
import pytest

import lorimer
from lorimer import types
from lorimer.client import connection, errors
from lorimer.client.transport import Transport
from tests.client.examples import batch
from tests.conformance.samples import eventually


def test_with_finishes_the_session_and_says_how(server):
    with lorimer.ServiceClient(display_name="good", base_url=server.url) as good:
        good.create_lora_training_client("lorimer/debug", rank=2)
    bad = lorimer.ServiceClient(display_name="bad", base_url=server.url)
    with pytest.raises(ZeroDivisionError), bad:
        bad.create_sampling_client(base_model="lorimer/debug")
        raise ZeroDivisionError
    stopped = lorimer.ServiceClient(display_name="stopped", base_url=server.url)
    with pytest.raises(asyncio.CancelledError), stopped:
        stopped.create_sampling_client(base_model="lorimer/debug")
        raise asyncio.CancelledError
    with pytest.raises(RuntimeError, match="closed"):
        bad.create_sampling_client(base_model="lorimer/debug")
    rest = lorimer.RestClient(base_url=server.url)
    with pytest.warns(lorimer.ExperimentalWarning):
        found = rest.search_sessions(types.SessionSearchRequest()).result().sessions
    ended = {one.display_name: one.status for one in found if one.display_name in ("good", "bad", "stopped")}
    assert {name: (status.reason.type, status.detail) for name, status in ended.items()} == {
        "good": ("success", None),
        "bad": ("errored", "ZeroDivisionError"),
        "stopped": ("interrupted", None),
    }


def test_session_carries_what_it_was_given(service, server):
    rest = service.create_rest_client()
    session = rest.get_session(service.holder.session_id).result()
    assert session.user_metadata == {"suite": "client"}
    assert service.holder.session_id in rest.list_sessions().result().sessions
    assert service.get_console_url() == f"{server.url}/console/sessions/{service.holder.session_id}"


def test_every_flag_that_the_sdk_knows_and_the_server_serves_is_on(service):
    connection = service.holder.connection
    flags = ("proto_compress_fwdbwd", "create_model_via_load_weights", "sample_use_retrieve_futures")
    flags += ("sample_join_sampling_session", "custom_loss_server_side")
    assert [name for name in flags if not getattr(connection.config, name)] == []
    assert connection.dynamic.sample_cancel_enabled


def test_heartbeat_of_a_finished_session_is_gone(server, service):
    def beat(session):
        body = {"session_id": session.get_session_id(), "type": "session_heartbeat"}
        call = service.holder.connection.transport.call("POST", "/api/v1/session_heartbeat", body, patience=0)
        return service.holder.run_coroutine_threadsafe(call).result()

    with lorimer.ServiceClient(base_url=server.url) as other:
        session = other.holder
        assert beat(session).status_code == 200
    with pytest.raises(lorimer.APIStatusError) as refused:
        beat(session)
    assert refused.value.status_code == 410


async def test_runs_and_checkpoints(service, trainer):
    rest = service.create_rest_client()
    path = (await trainer.save_state("listed", ttl_seconds=7200)).path
    run = await rest.get_training_run_by_tinker_path_async(path)
    assert (run.training_run_id, run.base_model, run.lora_rank) == (trainer.model_id, "lorimer/debug", 4)
    assert trainer.model_id in {one.training_run_id for one in rest.list_training_runs(limit=50).result().training_runs}
    assert [one.tinker_path for one in rest.list_checkpoints(trainer.model_id).result().checkpoints] == [path]
    mine = {one.tinker_path: one for one in (await rest.list_user_checkpoints_async()).checkpoints}
    tracked = rest.get_run(trainer.model_id).result()
    assert (mine[path].run_id, mine[path].run_name) == (tracked.run_id, tracked.name)
    assert (await rest.get_weights_info_by_tinker_path(path)).lora_rank == 4
    await rest.publish_checkpoint_from_tinker_path_async(path)
    await rest.set_checkpoint_ttl_from_tinker_path_async(path, None)
    listed = (await rest.list_checkpoints_async(trainer.model_id)).checkpoints[0]
    assert listed.public and listed.expires_at is None
    await rest.unpublish_checkpoint_from_tinker_path_async(path)
    await rest.delete_checkpoint_from_tinker_path_async(path)
    assert rest.list_checkpoints(trainer.model_id).result().checkpoints == []


def test_copies_of_weights(service, trainer):
    path = trainer.save_state("original").result().path
    rest = service.create_rest_client()
    with pytest.raises(ValueError, match="TINKER_PROJECT_ID"):
        rest.copy_weights(path)
    copied = rest.copy_weights(path, "default").result()
    assert copied != path and copied.startswith("tinker://")


def test_samplers_and_who_is_asking(service):
    rest = service.create_rest_client()
    sampler = service.create_sampling_client(base_model="lorimer/debug")
    assert rest.get_sampler(sampler._sampling_session_id).result().base_model == "lorimer/debug"
    assert rest.whoami().result().user_urn


def test_administration(server):
    admin = lorimer.AdminClient(base_url=server.url)
    hour = datetime.now(UTC).replace(minute=0, second=0, microsecond=0)
    with lorimer.ServiceClient(base_url=server.url, project_id="counted") as service:
        trainer = service.create_lora_training_client("lorimer/debug", rank=2)
        data = batch()
        trainer.forward_backward(data, "cross_entropy").result()
        path = trainer.save_state("counted").result().path
        session_id = service.holder.session_id

    def trained() -> list[int]:
        found = admin.get_billing_usage(hour, hour + timedelta(hours=2)).result().data
        events = [event.event_info for event in found if event.session_id == session_id]
        return [event.token_count for event in events if event.type == "training"]

    eventually(lambda: trained() == [sum(datum.model_input.length for datum in data)])
    saved = [entry for entry in admin.get_audit_log("checkpoints").result().entries if entry.tinker_path == path]
    assert [(entry.event, entry.model_id) for entry in saved] == [("checkpoint_saved", trainer.model_id)]
    (storage,) = admin.get_current_checkpoint_storage_usage(project_id="counted").result().data
    assert (storage.checkpoint_count, storage.size_bytes > 0) == (1, True)


def test_accessible(server, monkeypatch):
    monkeypatch.setenv("LORIMER_BASE_URL", server.url)
    assert lorimer.auth.tinker_has_credentials()
    lorimer.auth.raise_if_tinker_not_accessible()
    monkeypatch.setenv("LORIMER_API_KEY", "tml-wrong")
    with pytest.raises(lorimer.AuthenticationError, match="not known"):
        lorimer.auth.raise_if_tinker_not_accessible()
    monkeypatch.setenv("LORIMER_BASE_URL", "http://127.0.0.1:9")
    with pytest.raises(lorimer.APIConnectionError, match="no server answers at"):
        lorimer.auth.raise_if_tinker_not_accessible()


def test_key_of_a_command(server, monkeypatch):
    key = os.environ["LORIMER_API_KEY"]
    monkeypatch.delenv("LORIMER_API_KEY")
    monkeypatch.setenv("TINKER_CREDENTIAL_CMD", f"echo {key}")
    with lorimer.ServiceClient(base_url=server.url) as service:
        assert service.get_server_capabilities().supported_models


def test_addresses(monkeypatch):
    assert connection.resolve_base_url(None) == "local"
    monkeypatch.setenv("TINKER_BASE_URL", "http://one/")
    assert connection.resolve_base_url("") == "http://one"
    monkeypatch.setenv("LORIMER_BASE_URL", "https://two/prefix/")
    assert connection.resolve_base_url(None) == "https://two/prefix"
    assert connection.resolve_base_url("local") == "local"
    with pytest.raises(ValueError, match="http://"):
        connection.resolve_base_url("localhost:8000")
    with pytest.raises(ValueError, match="model"):
        lorimer.ServiceClient(base_url="http://one", model="lorimer/debug")
    with pytest.warns(FutureWarning, match="colour"):
        lorimer.ServiceClient(base_url="http://one", colour="red")


def test_errors_can_be_pickled():
    request = httpx2.Request("POST", "http://host/api/v1/x")
    response = httpx2.Response(404, request=request)
    originals = [
        errors.status_error(response, {"detail": "there is no x"}),
        errors.APITimeoutError(request),
        errors.APIConnectionError(request, "gone"),
        errors.APIResponseValidationError(response, "body", "unreadable"),
        errors.RequestFailedError("it failed", "r1", types.RequestErrorCategory.User),
        errors.ResultLost("lost"),
    ]
    for original in originals:
        copy = pickle.loads(pickle.dumps(original))
        assert type(copy) is type(original) and str(copy) == str(original)
        assert getattr(copy, "status_code", None) == getattr(original, "status_code", None)


class Answers(httpx2.AsyncBaseTransport):
    """Plays back answers: statuses with headers, or errors."""

    def __init__(self, *answers) -> None:
        self.answers, self.requests = list(answers), []

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        self.requests.append(request)
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return httpx2.Response(answer[0], headers=answer[1], content=answer[2], request=request)


def play(*answers, **options) -> tuple[httpx2.Response, Answers]:
    made = connection.Connection("http://server", "tml-key")
    played = Answers(*answers)

    async def opened() -> httpx2.AsyncBaseTransport:
        return played

    transport = Transport("http://server", made.transport.credentials, made.loop, open_transport=opened)
    return made.run(transport.call("POST", "/api/v1/x", {}, **options)).result(20), played


SOON = {"retry-after-ms": "5"}


@pytest.mark.parametrize(
    "failure",
    [
        httpx2.ConnectError("refused"),
        httpx2.ReadTimeout("late"),
        httpx2.RemoteProtocolError("cut"),
        (503, SOON, b"{}"),
        (429, SOON, b"{}"),
        (400, {}, b""),
        (418, {"x-should-retry": "true"} | SOON, b"{}"),
    ],
    ids=["refused", "late", "cut", "503", "429", "empty 400", "told to"],
)
def test_what_passes_is_tried_again_with_the_same_key(failure):
    response, played = play(failure, (200, {}, b"{}"))
    assert response.status_code == 200
    assert len({request.headers["x-idempotency-key"] for request in played.requests}) == 1
    assert played.requests[0].headers["x-api-key"] == "tml-key"


@pytest.mark.parametrize("status", [400, 401, 403, 404, 422])
def test_what_stays_is_raised_at_once(status):
    with pytest.raises(lorimer.APIStatusError) as caught:
        play((status, {}, b'{"detail": "no"}'))
    assert caught.value.status_code == status and str(caught.value).endswith("no")
