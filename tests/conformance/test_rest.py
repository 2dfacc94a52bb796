"""RestClient: runs, checkpoints, sessions, copies and traces, of oneself and of other users."""

import json
import tarfile
from datetime import UTC, datetime, timedelta
from io import BytesIO

import httpx
import numpy as np
import pytest
import tinker
from tinker import types

from tests.conformance.coverage import covers
from tests.conformance.samples import (
    MODEL,
    RANK,
    batch,
    current_logprobs,
    fetch,
    new_name,
    prompt_of,
    step,
)

DATA = batch()
GONE = (tinker.NotFoundError, tinker.RequestFailedError)


@pytest.fixture(scope="module")
def learned(service):
    trainer = service.create_lora_training_client(MODEL, rank=RANK, seed=5, user_metadata={"purpose": "rest"})
    step(trainer, DATA)
    return trainer


@pytest.fixture
def path(learned, request):
    return learned.save_state(f"state-{abs(hash(request.node.name)) % 10**9}").result().path


def lasting(run):
    """What is said of a run, without the moment of its last request, which is written a little later."""
    return run.model_dump(exclude={"last_request_time"})


def session_id(service):
    return service.holder.get_session_id()


def paths(rest, trainer):
    return [one.tinker_path for one in rest.list_checkpoints(trainer.model_id).result().checkpoints]


# ── runs ──────────────────────────────────────────────────────────────────────────────────────────────


@covers(
    "RestClient.get_training_run",
    "RestClient.get_training_run_async",
    "RestClient.get_training_run_by_tinker_path",
    "RestClient.get_training_run_by_tinker_path_async",
)
async def test_run_shows_its_last_checkpoints(rest, learned, path):
    sampler = learned.save_weights_for_sampler("latest").result().path
    run = rest.get_training_run(learned.model_id).result()
    assert (run.training_run_id, run.base_model, run.is_lora, run.lora_rank) == (learned.model_id, MODEL, True, RANK)
    assert (run.last_checkpoint.tinker_path, run.last_sampler_checkpoint.tinker_path) == (path, sampler)
    assert run.user_metadata == {"purpose": "rest"}
    assert not run.corrupted
    assert abs(datetime.now(UTC) - run.last_request_time) < timedelta(minutes=5)
    assert run.model_owner == rest.whoami().result().user_urn
    assert lasting(await rest.get_training_run_async(learned.model_id)) == lasting(run)
    assert lasting(rest.get_training_run_by_tinker_path(path).result()) == lasting(run)
    assert lasting(await rest.get_training_run_by_tinker_path_async(path)) == lasting(run)
    rest.delete_checkpoint_from_tinker_path(sampler).result()


@covers("RestClient.list_training_runs", "RestClient.list_training_runs_async")
async def test_runs_are_listed_in_pages_newest_first(alice, rest):
    project = new_name("paged")
    with alice.service(project_id=project) as service:
        made = [service.create_lora_training_client(MODEL, rank=RANK).model_id for _ in range(3)]
        first = rest.list_training_runs(limit=2, project_id=project).result()
        rest_of_them = await rest.list_training_runs_async(limit=2, offset=2, project_id=project)
    assert [run.training_run_id for run in first.training_runs + rest_of_them.training_runs] == made[::-1]
    assert (first.cursor.total_count, rest_of_them.cursor.offset) == (3, 2)


def test_runs_of_another_user_do_not_exist(learned, bob):
    with pytest.raises(tinker.NotFoundError, match="no training run"):
        bob.rest().get_training_run(learned.model_id).result()
    assert learned.model_id not in [
        run.training_run_id for run in bob.rest().list_training_runs().result().training_runs
    ]


# ── checkpoints ───────────────────────────────────────────────────────────────────────────────────────


@covers(
    "RestClient.list_checkpoints",
    "RestClient.list_checkpoints_async",
    "RestClient.list_user_checkpoints",
    "RestClient.list_user_checkpoints_async",
)
async def test_checkpoints_of_run_and_user(rest, learned, path):
    external = learned.save_weights_external("listed").result().path
    shown = rest.list_checkpoints(learned.model_id).result().checkpoints
    assert [one.tinker_path for one in shown[:2]] == [external, path]
    assert [one.checkpoint_type for one in shown[:2]] == ["external", "training"]
    assert all(one.size_bytes > 1000 and not one.public and one.time.tzinfo for one in shown)
    assert (await rest.list_checkpoints_async(learned.model_id)).checkpoints == shown
    mine = rest.list_user_checkpoints(limit=1).result()
    more = await rest.list_user_checkpoints_async(limit=1, offset=1)
    assert [one.tinker_path for one in mine.checkpoints + more.checkpoints] == [external, path]
    assert mine.cursor.total_count >= len(shown)
    rest.delete_checkpoint_from_tinker_path(external).result()


@covers("RestClient.get_weights_info_by_tinker_path")
def test_weights_info_is_the_shape_of_the_adapter(service, rest):
    trainer = service.create_lora_training_client(MODEL, rank=2, train_mlp=False)
    info = rest.get_weights_info_by_tinker_path(trainer.save_state("shape").result().path).result()
    assert (info.base_model, info.is_lora, info.lora_rank) == (MODEL, True, 2)
    assert (info.train_attn, info.train_mlp, info.train_unembed) == (True, False, True)
    assert info.optimizer_config.type == "adamw"


@covers(
    "RestClient.delete_checkpoint",
    "RestClient.delete_checkpoint_async",
    "RestClient.delete_checkpoint_from_tinker_path",
    "RestClient.delete_checkpoint_from_tinker_path_async",
)
async def test_deleted_checkpoints_are_gone_but_samplers_go_on(service, rest, learned):
    saved = [learned.save_weights_for_sampler(f"doomed-{number}").result().path for number in range(4)]
    client = service.create_sampling_client(model_path=saved[0])
    before = client.compute_logprobs(prompt_of([5, 6, 7])).result()
    rest.delete_checkpoint(learned.model_id, "sampler_weights/doomed-0").result()
    await rest.delete_checkpoint_async(learned.model_id, "sampler_weights/doomed-1")
    rest.delete_checkpoint_from_tinker_path(saved[2]).result()
    await rest.delete_checkpoint_from_tinker_path_async(saved[3])
    assert not set(saved) & set(paths(rest, learned))
    assert client.compute_logprobs(prompt_of([5, 6, 7])).result() == before
    with pytest.raises(tinker.NotFoundError, match="doomed-0"):
        service.create_sampling_client(model_path=saved[0])
    with pytest.raises(tinker.NotFoundError):
        rest.delete_checkpoint_from_tinker_path(saved[2]).result()


@covers(
    "RestClient.publish_checkpoint_from_tinker_path",
    "RestClient.publish_checkpoint_from_tinker_path_async",
    "RestClient.unpublish_checkpoint_from_tinker_path",
    "RestClient.unpublish_checkpoint_from_tinker_path_async",
)
async def test_published_checkpoint_is_open_to_others_until_unpublished(rest, learned, bob, path):
    with bob.service() as stranger:
        with pytest.raises(tinker.NotFoundError):
            stranger.create_training_client_from_state(path)
        rest.publish_checkpoint_from_tinker_path(path).result()
        await rest.unpublish_checkpoint_from_tinker_path_async(path)
        await rest.publish_checkpoint_from_tinker_path_async(path)
        theirs = stranger.create_training_client_from_state(path)
        np.testing.assert_allclose(current_logprobs(theirs, DATA), current_logprobs(learned, DATA), atol=1e-6)
        seen = bob.rest().get_training_run(learned.model_id, access_scope="accessible").result()
        assert seen.last_checkpoint.tinker_path == path
        assert seen.last_checkpoint.public
        assert paths(bob.rest(), learned) == [path]
        with pytest.raises(tinker.NotFoundError):
            bob.rest().delete_checkpoint_from_tinker_path(path).result()
        rest.unpublish_checkpoint_from_tinker_path(path).result()
        with pytest.raises(tinker.NotFoundError):
            stranger.create_training_client_from_state(path)


@covers("RestClient.set_checkpoint_ttl_from_tinker_path", "RestClient.set_checkpoint_ttl_from_tinker_path_async")
async def test_lifetime_is_set_and_taken_away(rest, learned, path):
    def expires_at():
        (found,) = [
            one for one in rest.list_checkpoints(learned.model_id).result().checkpoints if one.tinker_path == path
        ]
        return found.expires_at

    assert expires_at() is None
    rest.set_checkpoint_ttl_from_tinker_path(path, 7200).result()
    assert abs(expires_at() - datetime.now(UTC) - timedelta(hours=2)) < timedelta(minutes=2)
    await rest.set_checkpoint_ttl_from_tinker_path_async(path, None)
    assert expires_at() is None
    with pytest.raises(tinker.BadRequestError, match="ttl_seconds"):
        rest.set_checkpoint_ttl_from_tinker_path(path, 1).result()


@covers("RestClient.copy_weights", "RestClient.copy_weights_async")
async def test_copy_into_a_project(rest, service, learned, alice, bob, path):
    copy = rest.copy_weights(path, "shelf", ttl_seconds=3600).result()
    other = await rest.copy_weights_async(path, "shelf")
    assert len({path, copy, other}) == 3
    loaded = service.create_training_client_from_state_with_optimizer(copy)
    np.testing.assert_allclose(current_logprobs(loaded, DATA), current_logprobs(learned, DATA), atol=1e-6)
    with pytest.raises(tinker.NotFoundError):
        bob.rest().copy_weights(path, "stolen").result()
    theirs = bob.rest().copy_weights(path, "given", weights_access_token=alice.key).result()
    assert theirs in [one.tinker_path for one in bob.rest().list_user_checkpoints().result().checkpoints]


def test_archive_of_older_releases_is_a_redirect_to_a_tar(alice, learned, path):
    checkpoint_id = types.ParsedCheckpointTinkerPath.from_tinker_path(path).checkpoint_id
    url = f"{alice.url}/api/v1/training_runs/{learned.model_id}/checkpoints/{checkpoint_id}/archive"
    answer = httpx.get(url, headers={"X-API-Key": alice.key})
    assert answer.status_code == 302
    with tarfile.open(fileobj=BytesIO(fetch(answer.headers["location"])), mode="r") as archive:
        assert {"adapter_config.json", "adapter_model.safetensors"} <= set(archive.getnames())


# ── sessions ──────────────────────────────────────────────────────────────────────────────────────────


@covers(
    "RestClient.get_session",
    "RestClient.get_session_async",
    "RestClient.list_sessions",
    "RestClient.list_sessions_async",
)
async def test_session_lists_its_runs_and_samplers(alice, rest):
    with alice.service(user_metadata={"a": "b"}, display_name="Members") as service:
        trainer = service.create_lora_training_client(MODEL, rank=RANK)
        sampler = service.create_sampling_client(base_model=MODEL)
        shown = rest.get_session(session_id(service)).result()
        assert shown.training_run_ids == [trainer.model_id]
        assert shown.sampler_ids == [sampler._sampling_session_id]
        assert (shown.user_metadata, shown.display_name) == ({"a": "b"}, "Members")
        assert await rest.get_session_async(session_id(service)) == shown
        assert rest.list_sessions(limit=1).result().sessions == [session_id(service)]
        second = (await rest.list_sessions_async(limit=1, offset=1)).sessions
        assert second != [session_id(service)]


def test_session_of_another_user_does_not_exist(service, bob):
    with pytest.raises(tinker.NotFoundError, match="no session"):
        bob.rest().get_session(session_id(service)).result()


@covers("RestClient.search_sessions", "RestClient.search_sessions_async")
@pytest.mark.filterwarnings("ignore::FutureWarning")
async def test_sessions_are_found_by_every_condition(alice, rest):
    made, hunt = [], new_name("hunt")
    for animal in ("Fox", "Hare", "Elk"):
        with alice.service(user_metadata={"batch": hunt}, project_id=hunt, display_name=f"{hunt} {animal}") as service:
            made.append(session_id(service))
            if animal == "Elk":
                trainer = service.create_lora_training_client(MODEL, rank=RANK)
                trainer.save_state("kept").result()

    def search(**query):
        return rest.search_sessions(types.SessionSearchRequest(**query)).result()

    page = search(project_ids=[hunt], limit=2)
    assert [found.session_id for found in page.sessions] == made[:0:-1]
    last = await rest.search_sessions_async(
        types.SessionSearchRequest(project_ids=[hunt], limit=2, cursor=page.next_cursor)
    )
    assert [found.session_id for found in last.sessions] == made[:1]
    assert [found.session_id for found in search(display_name=f"{hunt} hare").sessions] == [made[1]]
    assert len(search(user_metadata={"batch": hunt}).sessions) == 3
    finished = types.ClientFinishedSessionStatusQuery(reasons=["success"])
    assert len(search(project_ids=[hunt], statuses=[finished]).sessions) == 3
    assert search(project_ids=[hunt], statuses=[types.ActiveSessionStatusQuery()]).sessions == []
    (found,) = search(session_id=made[2]).sessions
    assert found.checkpoints_count == 1
    assert found.checkpoint_storage_bytes > 1000
    assert found.owner == rest.whoami().result().user_urn


@covers("RestClient.assign_session_project", "RestClient.assign_session_project_async")
@pytest.mark.filterwarnings("ignore::FutureWarning")
async def test_session_is_put_into_a_project_with_its_runs(alice, rest):
    first, second = new_name("first"), new_name("second")
    with alice.service() as service:
        trainer = service.create_lora_training_client(MODEL, rank=RANK)
        rest.assign_session_project(session_id(service), first).result()
        await rest.assign_session_project_async(session_id(service), second)
        found = rest.search_sessions(types.SessionSearchRequest(session_id=session_id(service))).result()
        assert [one.project_id for one in found.sessions] == [second]
        assert rest.list_training_runs(project_id=first).result().training_runs == []
        runs = rest.list_training_runs(project_id=second).result().training_runs
        assert [run.training_run_id for run in runs] == [trainer.model_id]


@covers("RestClient.export_session_trace", "RestClient.export_session_trace_async")
async def test_trace_shows_what_the_session_did(alice, rest):
    with alice.service() as service:
        trainer = service.create_lora_training_client(MODEL, rank=RANK)
        step(trainer, DATA)
        url = rest.export_session_trace(session_id(service)).result()
        other = await rest.export_session_trace_async(session_id(service))
    events = json.loads(fetch(url))["traceEvents"]
    slices = [event for event in events if event["ph"] == "X"]
    assert {"forward_backward", "optim_step"} <= {event["name"] for event in slices}
    assert all(event["dur"] >= 0 and event["ts"] >= 0 for event in slices)
    assert json.loads(fetch(other))["traceEvents"]


# ── identity ──────────────────────────────────────────────────────────────────────────────────────────


@covers("RestClient.whoami")
def test_whoami_tells_users_apart(rest, bob):
    mine, theirs = rest.whoami().result(), bob.rest().whoami().result()
    assert mine.user_urn != theirs.user_urn
    assert mine.org_urn == theirs.org_urn


@covers(
    "RestClient.get_audit_log",
    "RestClient.get_audit_log_async",
    "RestClient.get_billing_usage",
    "RestClient.get_billing_usage_async",
    "RestClient.get_current_checkpoint_storage_usage",
    "RestClient.get_current_checkpoint_storage_usage_async",
)
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
async def test_deprecated_admin_methods_answer_as_the_admin_client(rest, admin, path):
    start = datetime.now(UTC).replace(minute=0, second=0, microsecond=0)
    hours = (start, start + timedelta(hours=2))
    assert rest.get_audit_log().result().entries == admin.get_audit_log().result().entries
    # The SDK can carry out this coroutine only on the loop of its own thread.
    assert rest.holder.run_coroutine_threadsafe(rest.get_audit_log_async()).result().entries
    assert rest.get_billing_usage(*hours).result() == await rest.get_billing_usage_async(*hours)
    storage = rest.get_current_checkpoint_storage_usage().result()
    assert storage == await rest.get_current_checkpoint_storage_usage_async()
    assert storage == admin.get_current_checkpoint_storage_usage().result()
