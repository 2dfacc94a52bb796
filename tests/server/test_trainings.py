"""Trainings that a server starts: where they are offered, what they may not reach, whose they are.

Their processes, and the ends of servers around them, are in ``tests/faults/test_trainings.py``.
"""

import dataclasses
import json
from pathlib import Path

import pytest

from lorimer.cookbook.train.kinds import KINDS
from lorimer.errors import InvalidInput
from lorimer.server.child_commands import ChildCommand
from lorimer.server.recipes import offered_recipe, recipe_command
from lorimer.server.trainings import (
    CODE_SETTINGS,
    OWN_SETTINGS,
    PATH_SETTINGS,
    Trainings,
    checked_recipe,
    checked_settings,
    memory_limit,
)
from lorimer.store import trainings, users
from lorimer.types.trainings import StartTrainingRequest
from tests.cli.commands import lorimer

HARMLESS = {
    "base_model",  # checked by the route: a model that is served
    "renderer_name",
    "train_on",
    "reduction",
    "schedule",
    "lr_schedule",
    "optimizer",
    "method",
    "name",
    "tags",
    "task",
    "loss_fn",
    "kind",
    "teacher_model",
    "teacher_prompt",
    "eval_tasks",  # checked: without files
    "advantages",
    "stale",
}
"""Settings with texts by which a training reads no file and runs no code of the server's machine."""


def has_text(schema):
    if "anyOf" in schema:
        return any(map(has_text, schema["anyOf"]))
    if schema.get("type") == "array":
        return has_text(schema["items"])
    if schema.get("type") == "object":
        inner = schema.get("properties")
        return inner is None or any(map(has_text, inner.values()))
    return schema.get("type") == "string"


@pytest.mark.parametrize("name", KINDS)
def test_every_setting_with_text_was_thought_about(name):
    """A new setting with a text may name a file: add it to those that are refused, or to the harmless ones."""
    texts = {one.name for one in KINDS[name].settings.values() if has_text(one.schema)}
    known = HARMLESS | set(OWN_SETTINGS) | set(CODE_SETTINGS) | set(PATH_SETTINGS)
    assert texts - known <= {"optimizer_params", "user_metadata", "loss_fn_config"}, "tables of numbers or notes"


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"data": "/etc/passwd"}, "settings has data, which the server decides; send the rows"),
        ({"held_out_data": "/etc/passwd"}, "which the server decides"),
        ({"log_dir": "/tmp/x"}, "which the server decides"),
        ({"base_url": "http://elsewhere"}, "which the server decides"),
        ({"sinks": ["wandb"]}, "which the server decides"),
        ({"grader": "os:system"}, "training_graders=allowed"),
        ({"graders": "ray"}, "training_graders=allowed"),
        ({"eval_grader": "python:/tmp/x.py:f"}, "training_graders=allowed"),
        ({"load_from": "/var/weights"}, "a tinker:// path is accepted"),
        ({"teacher_path": "../x"}, "a tinker:// path is accepted"),
        ({"eval_tasks": ["questions=/etc/passwd"]}, "tasks without a file are accepted"),
        ({"eval_tasks": "gsm8k,svamp=/etc/passwd"}, "tasks without a file are accepted"),
    ],
)
def test_settings_that_reach_files_or_code_are_refused(settings, told):
    asked = StartTrainingRequest(kind="sft", settings={"base_model": "m"} | settings, data="{}")
    with pytest.raises(InvalidInput, match="settings has") as refused:
        checked_settings(asked, may_name_code=False)
    assert told in str(refused.value)


def test_code_is_accepted_where_it_is_allowed():
    asked = StartTrainingRequest(kind="rl", settings={"base_model": "m", "grader": "mine:grade"}, data="{}")
    assert checked_settings(asked, may_name_code=True)["grader"] == "mine:grade"
    with pytest.raises(InvalidInput, match="data is missing"):
        checked_settings(StartTrainingRequest(kind="sft", settings={"base_model": "m"}), may_name_code=False)
    with pytest.raises(InvalidInput, match="no base_model"):
        checked_settings(StartTrainingRequest(kind="sft", data="{}"), may_name_code=False)


async def test_offered_on_loopback_without_keys_or_where_it_is_on(start):
    body = {"kind": "sft", "settings": {"base_model": "lorimer/tiny"}, "data": "{}"}
    async with start() as running:
        assert (await running.http.get("/api/v1/training_kinds")).json()["is_offered"] is True
        refused = await running.http.post("/api/v1/trainings", json=body)
        assert (refused.status_code, refused.json()["code"]) == (409, "not_listening")  # this test has no port
        settings = dataclasses.replace(running.context.settings, role="api", database="postgresql://u@h/d")
        replica = Trainings(settings, running.context.store, running.context.credentials, running.context.directory)
        assert "API replica" in replica.reason_against()
        headers = {"X-API-Key": (await running.new_key())[1]}
        refused = await running.http.post("/api/v1/trainings", json=body, headers=headers)
        assert (refused.status_code, refused.json()["code"]) == (403, "trainings_off")
        assert "sets trainings to on" in refused.json()["detail"]
        kinds = (await running.http.get("/api/v1/training_kinds", headers=headers)).json()
        assert kinds["is_offered"] is False and "sets trainings to on" in kinds["reason"]
    for value, code in (("on", "not_listening"), ("off", "trainings_off")):
        async with start(trainings=value) as running:
            headers = {"X-API-Key": (await running.new_key())[1]}
            refused = await running.http.post("/api/v1/trainings", json=body, headers=headers)
            assert refused.json()["code"] == code


def stored(training_id, user_id):
    facts = {"kind": "sft", "base_model": "lorimer/tiny", "settings": {}, "is_dry_run": False}
    return facts | {"training_id": training_id, "user_id": user_id}


async def test_left_behind_is_interrupted_and_its_key_revoked(start):
    """As after `kill -9` of a server: a row says running, and its key is valid."""
    async with start() as running:
        key, secret = await running.new_key()
        await running.context.store.write(trainings.add, stored("t1", key.user_id))
        process_key, _ = await running.context.credentials.create("alice", "training t1")
        await running.context.store.write(trainings.set_key, "t1", process_key.key_id)
    async with start(trainings="on") as running:
        headers = {"X-API-Key": secret}
        (found,) = (await running.http.get("/api/v1/trainings", headers=headers)).json()["trainings"]
        assert (found["state"], found["error"]) == ("interrupted", None)
        keys = {one.key_id: one for one in await running.context.store.read(users.list_keys, key.user_id)}
        assert keys[process_key.key_id].revoked_at is not None and keys[key.key_id].revoked_at is None
        gone = await running.http.post("/api/v1/trainings/t1/resume", headers=headers)
        assert gone.status_code == 404 and "directory of this training is gone" in gone.json()["detail"]


async def test_others_see_nothing(start):
    async with start(trainings="on") as running:
        key, alice = await running.new_key("alice")
        _, bob = await running.new_key("bob")
        await running.context.store.write(trainings.add, stored("t1", key.user_id))
        await running.context.store.write(trainings.finish, "t1", "stopped")
        for method, path in (("GET", ""), ("POST", "/stop"), ("POST", "/resume"), ("DELETE", "")):
            answer = await running.http.request(method, f"/api/v1/trainings/t1{path}", headers={"X-API-Key": bob})
            assert (answer.status_code, answer.json()["code"]) == (404, "not_found")
        listed = await running.http.get("/api/v1/trainings", headers={"X-API-Key": bob})
        assert listed.json() == {"trainings": [], "total_count": 0}
        mine = await running.http.get("/api/v1/trainings/t1", headers={"X-API-Key": alice})
        assert (mine.json()["state"], mine.json()["output"]) == ("stopped", "")
        deleted = await running.http.delete("/api/v1/trainings/t1", headers={"X-API-Key": alice})
        assert deleted.status_code == 204


async def test_a_process_that_needs_more_memory_than_it_may_have_says_so(tmp_path):
    child = await ChildCommand.start(["train", "schema"], tmp_path, "http://127.0.0.1:9", "", 60 * 2**20)
    assert await child.wait() != 0
    assert child.error().startswith("it needed more than the 62914560 bytes it may have (training_memory_bytes): ")
    assert memory_limit(-1) == 0 and memory_limit(5) == 5 and memory_limit(0) > 2**20


RECIPES = {
    "recipe:one": offered_recipe(
        {
            "required": ["data"],
            "properties": {
                "model": {"type": "string"},
                "data": {"type": "string"},
                "log_dir": {"type": "string", "format": "path"},
                "agent": {"type": "string"},
                "teacher": {"anyOf": [{"type": "string"}, {"type": "null"}]},
                "graders": {"enum": ["processes", "ray"]},
                "steps": {"type": "integer", "minimum": 1},
                "grader_workers": {"type": "integer", "minimum": 1},
                "suffix": {"type": "string"},
            },
        }
    )
    | {"x-rows": "needed"}
}


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ({"kind": "recipe:on"}, "the nearest is 'recipe:one'"),
        ({"settings": {"step": 1}}, "the nearest is 'steps'"),
        ({"settings": {"log_dir": "/tmp"}}, "does not accept from users"),
        ({"settings": {"data": "/etc/passwd"}}, "does not accept from users"),
        ({"settings": {"agent": "os:system"}}, "does not accept from users"),
        ({"settings": {"graders": "ray"}}, "does not accept from users"),
        ({"settings": {"grader_workers": 5000}}, "does not accept from users"),
        ({"settings": {"suffix": True}}, "not a choice between true and false"),
        ({"settings": {"suffix": "a\0b"}}, "a null character is not accepted"),
        ({"settings": {"steps": ["--data=x"]}}, "a text, a number or a boolean"),
        ({"settings": {"teacher": "/var/weights"}}, "a tinker:// path is accepted"),
        ({"data": None}, "data is missing"),
        ({"dry_run": True}, "dry_run is set, which recipes do not have"),
    ],
)
def test_options_of_recipes_that_reach_files_or_code_are_refused(asked, told):
    given = {"kind": "recipe:one", "data": "{}", **asked}
    given["settings"] = {"base_model": "m"} | given.get("settings", {})
    with pytest.raises(InvalidInput) as refused:
        checked_recipe(StartTrainingRequest(**given), RECIPES)
    assert told in str(refused.value)


def test_every_text_of_a_recipe_was_thought_about():
    """A new option with a text may name a file: it is not offered until it is among ``TEXTS``."""
    found = json.loads(lorimer("recipe", "schema").stdout)
    assert {"arithmetic_rl", "sweep", "chat_sft", "agent_rl"} <= found.keys() and "eval_gsm8k" not in found
    for schema in found.values():
        offered = offered_recipe(schema)["properties"].keys()
        assert not offered & {"data", "base_url", "log_dir", "output", "grader", "graders", "agent", "start_from"}
        assert "base_model" in offered
    command = recipe_command("recipe:one", {"base_model": "m", "steps": 3}, Path("log/one"), Path("data.jsonl"))
    assert command == ["recipe", "run", "one", "--log-dir=log/one", "--data=data.jsonl", "--model=m", "--steps=3"]


async def test_too_many_rows_are_refused(start):
    async with start(max_training_data_bytes=1024) as running:
        running.context.url = "http://127.0.0.1:9"
        body = {"kind": "sft", "settings": {"base_model": "lorimer/tiny"}, "data": "x" * 1500}
        refused = await running.http.post("/api/v1/trainings", json=body)
        assert refused.status_code == 413 and "max_training_data_bytes" in refused.json()["detail"]
        assert not list((running.context.directory.path / "trainings").glob("*"))
