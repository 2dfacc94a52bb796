"""AdminClient: the audit log, usage by the hour and storage, as sums of what was done."""

from datetime import UTC, datetime, timedelta

import pytest
import tinker
from tinker import types

from tests.conformance.coverage import covers
from tests.conformance.samples import MODEL, RANK, batch, eventually, new_name, prompt_of, step

DATA = batch()


def on_its_own_loop(client, coroutine):
    """The SDK can carry out some of its coroutines only on the loop of its own thread."""
    return client.holder.run_coroutine_threadsafe(coroutine).result()


@covers("AdminClient.get_audit_log", "AdminClient.get_audit_log_async")
def test_audit_log_tells_the_life_of_a_checkpoint(admin, rest, service, bob):
    trainer = service.create_lora_training_client(MODEL, rank=RANK)
    path = trainer.save_state("audited").result().path
    rest.publish_checkpoint_from_tinker_path(path).result()
    rest.delete_checkpoint_from_tinker_path(path).result()
    entries = [entry for entry in admin.get_audit_log("checkpoints").result().entries if entry.tinker_path == path]
    assert [entry.event for entry in entries] == ["checkpoint_deleted", "checkpoint_published", "checkpoint_saved"]
    assert all(entry.model_id == trainer.model_id for entry in entries)
    today = datetime.now(UTC).date()
    assert on_its_own_loop(admin, admin.get_audit_log_async(day=today)).entries
    assert admin.get_audit_log(day=today - timedelta(days=3)).result().entries == []
    assert path not in [entry.tinker_path for entry in bob.admin().get_audit_log().result().entries]


@covers("AdminClient.get_billing_usage", "AdminClient.get_billing_usage_async")
async def test_usage_counts_tokens_and_checkpoints(admin, alice):
    start = datetime.now(UTC).replace(minute=0, second=0, microsecond=0)
    hours = (start, start + timedelta(hours=2))
    with alice.service(user_metadata={"team": "blue"}, project_id="billed") as service:
        identifier = service.holder.get_session_id()
        trainer = service.create_lora_training_client(MODEL, rank=RANK)
        step(trainer, DATA)
        trainer.save_state("counted").result()
        sampler = service.create_sampling_client(base_model=MODEL)
        sampler.sample(prompt_of([5, 6, 7, 8]), 3, types.SamplingParams(max_tokens=5, stop=[])).result()

    def of_session():
        return [event for event in admin.get_billing_usage(*hours).result().data if event.session_id == identifier]

    eventually(
        lambda: {event.event_info.type for event in of_session()} >= {"training", "sampling_sample", "checkpoint"}
    )
    found = {event.event_info.type: event for event in of_session()}
    assert found["training"].event_info.token_count == 25
    assert found["sampling_sample"].event_info.token_count == 15
    assert found["checkpoint"].event_info.count == 1
    assert {event.project_id for event in found.values()} == {"billed"}
    assert {event.base_model for event in found.values()} == {MODEL}
    usage = await admin.get_billing_usage_async(start.isoformat(), (start + timedelta(hours=2)).isoformat())
    assert usage.sessions[identifier].user_metadata == {"team": "blue"}


def test_usage_of_half_hours_is_refused(admin):
    start = datetime(2026, 1, 1, 0, 30, tzinfo=UTC)
    with pytest.raises(tinker.BadRequestError, match="full hour"):
        admin.get_billing_usage(start, start + timedelta(hours=1)).result()


@covers("AdminClient.get_current_checkpoint_storage_usage", "AdminClient.get_current_checkpoint_storage_usage_async")
async def test_storage_is_the_sum_of_the_checkpoints(admin, rest, alice):
    saved = {new_name("stored"): 2, new_name("stored"): 1}
    items = []
    for project, count in saved.items():
        with alice.service(project_id=project) as service:
            trainer = service.create_lora_training_client(MODEL, rank=RANK)
            for number in range(count):
                trainer.save_state(f"number-{number}").result()
        size = sum(one.size_bytes for one in rest.list_checkpoints(trainer.model_id).result().checkpoints)
        (item,) = admin.get_current_checkpoint_storage_usage(project_id=project).result().data
        assert (item.checkpoint_count, item.size_bytes, item.project_id) == (count, size, project)
        assert item.size_gigabytes == pytest.approx(size / 1e9)
        items.append(item)
    everything = (await admin.get_current_checkpoint_storage_usage_async()).data
    assert [item for item in everything if item.project_id in saved] in (items, items[::-1])
