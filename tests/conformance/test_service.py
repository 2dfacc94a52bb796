"""ServiceClient: capabilities, new runs, resumed runs, samplers, copies, and the life of a session."""

import dataclasses
import json

import numpy as np
import pytest
import tinker
from safetensors.numpy import load_file
from tinker import types

from tests.conformance.coverage import covers
from tests.conformance.samples import (
    MODEL,
    RANK,
    TWIN,
    batch,
    current_logprobs,
    download,
    eventually,
    prompt_of,
    step,
    tokens_of,
)

DATA = batch()
FLAGS = {
    "pjwt_auth_enabled",
    "proto_compress_fwdbwd",
    "create_model_via_load_weights",
    "sample_use_retrieve_futures",
    "sample_join_sampling_session",
    "custom_loss_server_side",
}


def session_id(service):
    return service.holder.get_session_id()


def search(rest, **query):
    with pytest.warns(tinker.ExperimentalWarning):
        return rest.search_sessions(types.SessionSearchRequest(**query)).result().sessions


def trained(service, **arguments):
    """A run that has learned something, and has moments."""
    trainer = service.create_lora_training_client(MODEL, rank=RANK, seed=3, **arguments)
    step(trainer, DATA)
    step(trainer, DATA, learning_rate=5e-3)
    return trainer


# ── configuration ─────────────────────────────────────────────────────────────────────────────────────


@covers("ServiceClient.holder")
def test_every_flag_that_this_release_knows_and_we_serve_is_on(service):
    holder = service.holder
    assert {name for name in FLAGS if getattr(holder.get_client_config(), name)} == FLAGS
    assert holder._client_dynamic_config.sample_cancel_enabled


@covers("ServiceClient.get_server_capabilities", "ServiceClient.get_server_capabilities_async")
async def test_capabilities_name_the_served_models(service, trainer):
    shown = service.get_server_capabilities().supported_models
    assert [model.model_name for model in shown] == [MODEL, TWIN]
    assert all(model.trainable and model.sampleable for model in shown)
    assert shown[0].max_context_length == 512
    assert (await service.get_server_capabilities_async()).supported_models == shown


def test_wrong_key_is_refused(server):
    with pytest.raises(tinker.AuthenticationError, match="not known, or was revoked"):
        tinker.ServiceClient(base_url=server.url, api_key="tml-wrong").get_server_capabilities()


def test_headers_of_the_user_are_sent_along(alice):
    client = alice.service(default_headers_overrides={"X-Team": "a"})
    assert client.get_server_capabilities().supported_models


# ── new runs ──────────────────────────────────────────────────────────────────────────────────────────


@covers("ServiceClient.create_lora_training_client")
def test_adapter_has_the_shape_that_was_asked_for(service, rest, tmp_path):
    trainer = service.create_lora_training_client(
        MODEL, rank=3, seed=1, train_mlp=False, train_unembed=False, user_metadata={"purpose": "shape"}
    )
    path = trainer.save_weights_external("shape").result().path
    directory = download(rest, path, tmp_path)
    assert json.loads((directory / "adapter_config.json").read_text("utf-8"))["r"] == 3
    tensors = load_file(directory / "adapter_model.safetensors")
    assert {name.split(".self_attn.")[-1].split(".")[0] for name in tensors} == {"q_proj", "k_proj", "v_proj", "o_proj"}
    assert all(3 in tensor.shape for tensor in tensors.values())
    run = rest.get_training_run(trainer.model_id).result()
    assert (run.lora_rank, run.base_model, run.user_metadata) == (3, MODEL, {"purpose": "shape"})


@covers("ServiceClient.create_lora_training_client_async")
async def test_same_seed_gives_the_same_adapter(service, rest, tmp_path):
    found = []
    for number, seed in enumerate((1, 1, 2)):
        trainer = await service.create_lora_training_client_async(MODEL, rank=RANK, seed=seed)
        path = trainer.save_weights_external("seed").result().path
        found.append(load_file(download(rest, path, tmp_path / str(number)) / "adapter_model.safetensors"))
    assert all(np.array_equal(found[0][name], found[1][name]) for name in found[0])
    assert not any(np.array_equal(found[0][name], found[2][name]) for name in found[0] if "lora_A" in name)


def test_base_model_that_is_not_served_is_named(service):
    with pytest.raises((tinker.BadRequestError, tinker.NotFoundError), match="Qwen/Qwen3-8B"):
        service.create_lora_training_client("Qwen/Qwen3-8B")


def test_optimizer_that_we_do_not_have_is_named(service):
    with pytest.raises(tinker.BadRequestError, match="dimuon"):
        service.create_lora_training_client(MODEL, optimizer=types.DimuonOptimizerConfig())


def test_model_can_be_served_under_two_names(service, trainer):
    twin = service.create_lora_training_client(TWIN, rank=RANK, seed=7)
    np.testing.assert_allclose(current_logprobs(twin, DATA), current_logprobs(trainer, DATA), atol=1e-6)


# ── resumed runs ──────────────────────────────────────────────────────────────────────────────────────


@covers(
    "ServiceClient.create_training_client_from_state_with_optimizer",
    "ServiceClient.create_training_client_from_state_with_optimizer_async",
)
async def test_run_resumed_with_optimizer_goes_on_as_if_never_stopped(service):
    original = trained(service)
    path = original.save_state("middle").result().path
    resumed = service.create_training_client_from_state_with_optimizer(path)
    again = await service.create_training_client_from_state_with_optimizer_async(path)
    for trainer in (original, resumed, again):
        step(trainer, DATA)
    expected = current_logprobs(original, DATA)
    for trainer in (resumed, again):
        np.testing.assert_allclose(current_logprobs(trainer, DATA), expected, atol=1e-5)


@covers("ServiceClient.create_training_client_from_state", "ServiceClient.create_training_client_from_state_async")
async def test_run_from_weights_alone_starts_with_fresh_moments(service, rest):
    original = trained(service)
    path = original.save_state("middle").result().path
    before = current_logprobs(original, DATA)
    resumed = service.create_training_client_from_state(path, user_metadata={"from": "weights"})
    again = await service.create_training_client_from_state_async(path, base_model=MODEL)
    assert resumed.model_id.startswith(f"{session_id(service)}:train:")
    for trainer in (resumed, again):
        np.testing.assert_allclose(current_logprobs(trainer, DATA), before, atol=1e-6)
    for trainer in (original, resumed):
        step(trainer, DATA)
    assert np.abs(current_logprobs(original, DATA) - current_logprobs(resumed, DATA)).max() > 1e-3
    run = rest.get_training_run(resumed.model_id).result()
    assert (run.lora_rank, run.user_metadata) == (RANK, {"from": "weights"})


def test_checkpoint_of_another_user_needs_that_users_token(service, bob):
    owner = bob.service()
    theirs = trained(owner)
    path = theirs.save_state("private").result().path
    with pytest.raises(tinker.NotFoundError, match="no checkpoint"):
        service.create_training_client_from_state(path)
    mine = service.create_training_client_from_state(path, weights_access_token=bob.key)
    np.testing.assert_allclose(current_logprobs(mine, DATA), current_logprobs(theirs, DATA), atol=1e-6)
    owner.close("success").result()


# ── samplers ──────────────────────────────────────────────────────────────────────────────────────────


@covers("ServiceClient.create_sampling_client", "ServiceClient.create_sampling_client_async")
async def test_sampling_clients_of_base_and_checkpoint_differ(service, rest):
    trainer = trained(service)
    weights = trainer.save_state("for-sampling").result().path
    named = trainer.save_weights_for_sampler("for-sampling").result().path
    prompt = prompt_of(tokens_of(10, 1))
    base = service.create_sampling_client(base_model=MODEL)
    samplers = [
        service.create_sampling_client(model_path=weights),
        await service.create_sampling_client_async(model_path=named, base_model=MODEL),
    ]
    plain, *tuned = [client.compute_logprobs(prompt).result()[1:] for client in (base, *samplers)]
    np.testing.assert_allclose(tuned[0], tuned[1], atol=1e-5)
    assert np.abs(np.subtract(plain, tuned[0])).max() > 1e-2


def test_sampling_client_needs_a_source(service):
    with pytest.raises(ValueError, match="model_path or base_model"):
        service.create_sampling_client()


def test_stability_info_is_refused_by_name(service):
    client = service.create_sampling_client(base_model=MODEL, record_stability_info=True)
    with pytest.raises(tinker.BadRequestError, match="record_stability_info"):
        client.sample(prompt_of([5, 6]), 1, types.SamplingParams(max_tokens=1)).result()


# ── copies ────────────────────────────────────────────────────────────────────────────────────────────


@covers("ServiceClient.copy_weights")
def test_copy_into_the_session_has_the_weights_and_its_own_life(alice, rest):
    service = alice.service(project_id="copies")
    trainer = trained(service)
    path = trainer.save_state("original").result().path
    copy = service.copy_weights(path, ttl_seconds=7200).result()
    assert copy != path
    rest.delete_checkpoint_from_tinker_path(path).result()
    loaded = service.create_training_client_from_state(copy)
    np.testing.assert_allclose(current_logprobs(loaded, DATA), current_logprobs(trainer, DATA), atol=1e-6)
    run_id = types.ParsedCheckpointTinkerPath.from_tinker_path(copy).training_run_id
    assert rest.list_checkpoints(run_id).result().checkpoints[0].expires_at is not None
    assert run_id in [
        run.training_run_id for run in rest.list_training_runs(project_id="copies").result().training_runs
    ]
    service.close("success").result()


# ── sessions ──────────────────────────────────────────────────────────────────────────────────────────


def test_session_carries_what_the_client_was_told(alice, rest, monkeypatch):
    monkeypatch.setenv("TINKER_TAGS", "one,two")
    service = alice.service(user_metadata={"k": "v"}, project_id="project-1", display_name="A name")
    identifier = session_id(service)
    (found,) = search(rest, session_id=identifier)
    assert (found.project_id, found.display_name, found.user_metadata) == ("project-1", "A name", {"k": "v"})
    assert found.status.type == "active"
    service.close("success").result()


def test_project_comes_from_the_environment_too(alice, rest, monkeypatch):
    monkeypatch.setenv("TINKER_PROJECT_ID", "project-of-environment")
    with alice.service() as service:
        identifier = session_id(service)
    assert [found.project_id for found in search(rest, session_id=identifier)] == ["project-of-environment"]


@covers("ServiceClient.close")
def test_close_records_reason_and_detail_once(alice, rest):
    service = alice.service()
    identifier = session_id(service)
    service.close("interrupted", detail="the power went").result()
    service.close("success").result()
    status = search(rest, session_id=identifier)[0].status
    assert (status.type, status.reason.type, status.detail) == ("client_finished", "interrupted", "the power went")


@covers("ServiceClient.__enter__", "ServiceClient.__exit__")
def test_block_that_fails_finishes_the_session_as_errored(alice, rest):
    ids = []
    with alice.service() as service:
        ids.append(session_id(service))
    with pytest.raises(ZeroDivisionError), alice.service() as service:
        ids.append(session_id(service))
        1 / 0  # noqa: B018
    assert [search(rest, session_id=one)[0].status.reason.type for one in ids] == ["success", "errored"]


@covers("ServiceClient.create_rest_client")
def test_rest_client_of_a_service_client(service):
    with pytest.warns(FutureWarning, match="create_rest_client"):
        rest = service.create_rest_client()
    assert session_id(service) in rest.list_sessions(limit=100).result().sessions


@covers("ServiceClient.get_console_url", "TrainingClient.get_console_url")
def test_console_addresses_name_session_and_run(service, trainer):
    assert service.get_console_url().endswith(f"/sessions/{session_id(service)}")
    assert trainer.get_console_url().endswith(f"/training_runs/{trainer.model_id}")


@covers(
    "ServiceClient.get_telemetry",
    "TrainingClient.get_telemetry",
    "SamplingClient.get_telemetry",
    "RestClient.get_telemetry",
    "AdminClient.get_telemetry",
)
def test_telemetry_is_accepted(alice, monkeypatch):
    monkeypatch.setenv("TINKER_TELEMETRY", "1")
    alice = dataclasses.replace(alice, url=alice.url + "/")  # the SDK keeps what it has for an address
    service = alice.service()
    trainer = service.create_lora_training_client(MODEL, rank=RANK)
    sampler = service.create_sampling_client(base_model=MODEL)
    assert trainer.get_telemetry() is sampler.get_telemetry() is service.get_telemetry()
    for client in (service, alice.rest(), alice.admin()):
        telemetry = client.get_telemetry()
        assert telemetry.log("a test", {"number": 1})
        telemetry._trigger_flush()
        assert telemetry._wait_until_drained_sync()


def test_heartbeat_of_a_finished_session_is_gone(alice, server):
    service = alice.service()
    holder = service.holder
    identifier = session_id(service)

    async def beat():
        with holder.aclient(holder_pool()) as client:
            return await client.service.session_heartbeat(session_id=identifier, max_retries=0)

    assert holder.run_coroutine_threadsafe(beat()).result().type == "session_heartbeat"
    service.close("success").result()
    rest = alice.service().holder

    async def late_beat():
        with rest.aclient(holder_pool()) as client:
            return await client.service.session_heartbeat(session_id=identifier, max_retries=0)

    with pytest.raises(tinker.APIStatusError) as refused:
        rest.run_coroutine_threadsafe(late_beat()).result()
    assert refused.value.status_code == 410


def holder_pool():
    from tinker.lib.client_connection_pool_type import ClientConnectionPoolType

    return ClientConnectionPoolType.SESSION


def test_sessions_of_a_user_are_listed_newest_first(alice, rest):
    with alice.service() as first, alice.service() as second:
        made = [session_id(first), session_id(second)]
        eventually(lambda: rest.list_sessions(limit=2).result().sessions == made[::-1])
