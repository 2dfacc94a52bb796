"""Checkpoints: logged when complete, resumed from, and deleted beyond the last few."""

import json

import pytest

from lorimer import AdamParams, BadRequestError, NotFoundError
from lorimer.cookbook.checkpoints import Checkpoint, Checkpoints, append_jsonl, open_training_client, read_jsonl
from lorimer.cookbook.datums import datum_from_tokens
from lorimer.errors import CheckpointError

MODEL = "lorimer/debug"
DATA = [datum_from_tokens([1, 2, 3, 4, 5], [0, 1, 1, 1, 1])]


async def step(client):
    passed = client.forward_backward(DATA, "cross_entropy")
    await client.optim_step(AdamParams(learning_rate=1e-2))
    return (await passed).metrics["loss:sum"]


async def test_goes_on_where_it_was(service, log_dir, capsys):
    checkpoints = Checkpoints(log_dir)
    assert checkpoints.last() is None
    client, start = await open_training_client(service, base_model=MODEL, rank=4, checkpoints=checkpoints, seed=7)
    assert start == 0
    losses = [await step(client) for _ in range(2)]
    saved = await checkpoints.save_async(client, 2, extra={"note": "hello"})
    losses += [await step(client) for _ in range(2)]
    assert checkpoints.last() == saved
    assert (saved.step, saved.extra) == (2, {"note": "hello"})

    resumed, start = await open_training_client(
        service, base_model=MODEL, rank=4, checkpoints=Checkpoints(log_dir), seed=7
    )
    assert start == 2
    assert capsys.readouterr().out == f"resumed at step 2 from {saved.state_path}\n"
    assert [await step(resumed) for _ in range(2)] == losses[2:], "with the optimiser, to the last bit"

    begun, start = await open_training_client(
        service, base_model=MODEL, rank=4, checkpoints=Checkpoints(log_dir / "other"), load_from=saved.state_path
    )
    assert start == 0
    assert await step(begun) == losses[2]
    assert await step(begun) != losses[3], "the weights without the optimiser"
    assert capsys.readouterr().out == ""


async def test_rank_that_loaded_weights_do_not_have_is_told_and_refused(service, log_dir, capsys):
    checkpoints = Checkpoints(log_dir)
    client, _ = await open_training_client(service, base_model=MODEL, rank=4, checkpoints=checkpoints, seed=7)
    saved = await checkpoints.save_async(client, 1)
    await open_training_client(
        service, base_model=MODEL, rank=8, checkpoints=Checkpoints(log_dir / "other"), load_from=saved.state_path
    )
    told = f"rank 8 is not used: {saved.state_path} has rank 4, and the run goes on with that\n"
    assert capsys.readouterr().out == told
    other = await service.create_lora_training_client_async(MODEL, rank=8)
    with pytest.raises(BadRequestError, match="the weights have rank 4, the run 8"):
        await other.load_state(saved.state_path)


async def test_what_is_saved_is_settled_when_it_is_asked_for(service, log_dir):
    checkpoints = Checkpoints(log_dir)
    client, _ = await open_training_client(service, base_model=MODEL, rank=4, checkpoints=checkpoints, seed=7)
    first = await step(client)
    finish = checkpoints.begin_save(client, 1)
    second = await step(client)
    assert checkpoints.last() is None, "not before it is complete"
    saved = await finish()
    assert (await checkpoints.save_async(client, 1)) == saved, "a step is saved once"
    resumed, _ = await open_training_client(service, base_model=MODEL, rank=4, checkpoints=checkpoints)
    assert await step(resumed) == second != first


async def test_only_the_last_stay_on_the_server(service, log_dir):
    checkpoints = Checkpoints(log_dir, keep=2)
    client, _ = await open_training_client(service, base_model=MODEL, rank=4, checkpoints=checkpoints, seed=7)
    saved = [await checkpoints.save_async(client, number) for number in range(1, 5)]
    assert checkpoints.all() == saved[2:]
    listed = await service.create_rest_client().list_checkpoints_async(client.model_id)
    kept = {checkpoint.tinker_path for checkpoint in listed.checkpoints}
    assert kept == {path for checkpoint in saved[2:] for path in (checkpoint.state_path, checkpoint.sampler_path)}


async def test_deletion_that_was_interrupted_is_done_again(service, log_dir):
    checkpoints = Checkpoints(log_dir, keep=1)
    client, _ = await open_training_client(service, base_model=MODEL, rank=4, checkpoints=checkpoints, seed=7)
    first = await checkpoints.save_async(client, 1)
    rest = service.create_rest_client()
    await rest.delete_checkpoint_from_tinker_path_async(first.state_path)
    second = await checkpoints.save_async(client, 2)
    assert checkpoints.all() == [second]
    with pytest.raises(NotFoundError):
        await rest.delete_checkpoint_from_tinker_path_async(first.sampler_path)


async def test_checkpoint_that_the_server_does_not_have(service, log_dir):
    path = "tinker://00000000-0000-0000-0000-000000000000:train:0/weights/000001"
    append_jsonl(log_dir / "checkpoints.jsonl", {"step": 1, "state_path": path, "sampler_path": path, "extra": {}})
    with pytest.raises(CheckpointError, match="which the server does not have"):
        await open_training_client(service, base_model=MODEL, rank=4, checkpoints=Checkpoints(log_dir))


def test_line_that_was_cut_short_is_no_line(tmp_path):
    path = tmp_path / "a" / "lines.jsonl"
    append_jsonl(path, {"a": 1})
    with path.open("a", encoding="utf-8") as file:
        file.write('{"a": 2')
    assert read_jsonl(path) == [{"a": 1}]
    append_jsonl(path, {"a": 3})
    assert [json.loads(line) for line in path.read_text("utf-8").splitlines()] == [{"a": 1}, {"a": 3}]


def test_keep_is_checked(tmp_path):
    with pytest.raises(ValueError, match="keep is 0; 1 or more, or None"):
        Checkpoints(tmp_path, keep=0)
    assert Checkpoint(step=1, state_path="a", sampler_path="b").extra == {}
