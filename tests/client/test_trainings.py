"""Trainings of the server by the SDK, in both manners of calling; a server with keys offers none, and checks data."""

import json

import pytest

import lorimer
from tests.client.conftest import MODEL

ROWS = "\n".join(json.dumps({"question": f"{a}?", "answer": str(a)}) for a in range(12))


async def test_a_server_with_keys_checks_data_and_refuses_trainings(service: lorimer.ServiceClient) -> None:
    """The check is made by a process that has a token of the caller."""
    rest = service.create_rest_client()
    report = await rest.check_data_async(MODEL, ROWS, num_shown=1, num_held_out=2)
    assert (report.num_rows, report.num_held_out, report.num_examples, report.findings) == (12, 2, 10, [])
    assert any(span.is_trained for span in report.previews[0]) and not report.previews[0][0].is_trained
    with pytest.raises(lorimer.BadRequestError, match="has no rows"):
        rest.check_data(MODEL, "").result()
    for refused in (
        rest.start_training("sft", {"base_model": MODEL}, data=ROWS),
        rest.start_training("rl", {"base_model": MODEL}, dry_run=True),
    ):
        with pytest.raises(lorimer.PermissionDeniedError, match="sets trainings to on"):
            refused.result()
    with pytest.raises(lorimer.PermissionDeniedError):
        await rest.start_training_async("sft", {"base_model": MODEL}, data=ROWS)
    kinds = await rest.list_training_kinds_async()
    assert not kinds.is_offered
    assert {kind for kind in kinds.kinds if not kind.startswith("recipe:")} == {"sft", "full", "rl", "dpo", "distill"}
    assert "recipe:chat_sft" in kinds.kinds
    assert "data" not in kinds.kinds["sft"]["properties"] and kinds == rest.list_training_kinds().result()
    assert rest.list_trainings().result() == await rest.list_trainings_async()
    for call in (rest.get_training, rest.stop_training, rest.resume_training, rest.delete_training):
        with pytest.raises(lorimer.NotFoundError, match="no training"):
            call("none").result()
    for call_async in (
        rest.get_training_async,
        rest.stop_training_async,
        rest.resume_training_async,
        rest.delete_training_async,
    ):
        with pytest.raises(lorimer.NotFoundError, match="no training"):
            await call_async("none")
