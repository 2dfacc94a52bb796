"""Runs and checkpoints: lists, pages, publishing, ends, deletion, copies."""

from datetime import UTC, datetime, timedelta

import pytest

from .conftest import MODEL

pytestmark = pytest.mark.asyncio(loop_scope="session")


@pytest.fixture
def newcomer(server):
    """Makes a user who has nothing yet."""

    async def make(name):
        key, secret = await server.context.credentials.create(name, "one")
        return type(server.ada)(server.ada.http, key.user_id, headers={"x-api-key": secret})

    return make


def place(path):
    """The address of a checkpoint below training_runs."""
    run_id, segment, name = path.removeprefix("tinker://").split("/")
    return f"training_runs/{run_id}/checkpoints/{segment}/{name}"


async def saved(client, name="one", kind="save_weights", **fields):
    run_id = await client.run()
    return run_id, await client.save(run_id, 1, name, kind=kind, **fields)


async def test_runs_are_listed_newest_first_with_their_last_checkpoints(newcomer):
    user = await newcomer("runs")
    session_id = await user.session(project_id="p")
    first, second = await user.run(session_id, 0), await user.run(session_id, 1)
    await user.save(second, 1, "a")
    await user.save(second, 2, "b", user_metadata={"k": "v"})
    await user.save(second, 3, "s", kind="save_weights_for_sampler")
    await user.save(second, 4, "x", kind="save_weights_external")
    page = await user.fetch("training_runs", params={"limit": 1})
    assert page["cursor"] == {"offset": 0, "limit": 1, "total_count": 2}
    [run] = page["training_runs"]
    assert run["training_run_id"] == second
    assert (run["base_model"], run["is_lora"], run["lora_rank"], run["corrupted"]) == (MODEL, True, 4, False)
    assert run["model_owner"] == f"tml:user:{user.user_id}"
    assert run["last_checkpoint"]["checkpoint_id"] == "weights/b"
    assert run["last_checkpoint"]["user_metadata"] == {"k": "v"}
    assert run["last_sampler_checkpoint"]["checkpoint_id"] == "sampler_weights/s"
    assert abs(datetime.fromisoformat(run["last_request_time"]) - datetime.now(UTC)) < timedelta(minutes=5)
    rest = await user.fetch("training_runs", params={"limit": 1, "offset": 1, "project_id": "p"})
    assert [found["training_run_id"] for found in rest["training_runs"]] == [first]
    assert (await user.fetch("training_runs", params={"project_id": "q"}))["training_runs"] == []


async def test_checkpoints_of_a_run_and_of_a_user(newcomer):
    user = await newcomer("checkpoints")
    run_id = await user.run()
    for number, kind in enumerate(("save_weights", "save_weights_for_sampler", "save_weights_external"), start=1):
        await user.save(run_id, number, f"c{number}", kind=kind, ttl_seconds=3600)
    listed = (await user.fetch(f"training_runs/{run_id}/checkpoints"))["checkpoints"]
    assert [(found["checkpoint_id"], found["checkpoint_type"]) for found in listed] == [
        ("external_weights/c3", "external"),
        ("sampler_weights/c2", "sampler"),
        ("weights/c1", "training"),
    ]
    assert listed[2]["tinker_path"] == f"tinker://{run_id}/weights/c1"
    assert listed[2]["size_bytes"] > listed[1]["size_bytes"] > 0
    assert not any(found["public"] for found in listed)
    left = datetime.fromisoformat(listed[0]["expires_at"]) - datetime.fromisoformat(listed[0]["time"])
    assert timedelta(minutes=59) < left < timedelta(minutes=61)
    everything = await user.fetch("checkpoints", params={"limit": 2, "offset": 1})
    assert everything["cursor"] == {"offset": 1, "limit": 2, "total_count": 3}
    assert {found["run_id"] for found in everything["checkpoints"]} == {run_id}
    no_run = {"run_id": None, "run_name": None}
    assert [found | no_run for found in everything["checkpoints"]] == listed[1:]


async def test_old_releases_never_see_exports(newcomer):
    user = await newcomer("old")
    run_id = await user.run()
    for number, kind in enumerate(("save_weights", "save_weights_external") * 3, start=1):
        await user.save(run_id, number, f"c{number}", kind=kind)
    old = user.release("0.27.2")
    assert len((await old.fetch(f"training_runs/{run_id}/checkpoints"))["checkpoints"]) == 3
    pages = [await old.fetch("checkpoints", params={"limit": 2, "offset": offset}) for offset in (0, 2)]
    assert [page["cursor"]["total_count"] for page in pages] == [3, 3]
    names = [found["checkpoint_id"] for page in pages for found in page["checkpoints"]]
    assert names == ["weights/c5", "weights/c3", "weights/c1"]
    assert (await user.fetch("checkpoints"))["cursor"]["total_count"] == 6


async def test_published_checkpoint_shows_its_run_to_others(ada, bob):
    run_id, path = await saved(ada, "public")
    await ada.save(run_id, 2, "private")
    accessible = {"params": {"access_scope": "accessible"}}
    assert (await bob.get(f"training_runs/{run_id}", **accessible)).status_code == 404
    assert (await ada.post(f"{place(path)}/publish", content=b"")).status_code == 204
    assert (await bob.get(f"training_runs/{run_id}")).status_code == 404
    run = await bob.fetch(f"training_runs/{run_id}", **accessible)
    assert run["last_checkpoint"]["checkpoint_id"] == "weights/public"
    listed = (await bob.fetch(f"training_runs/{run_id}/checkpoints"))["checkpoints"]
    assert [(found["checkpoint_id"], found["public"]) for found in listed] == [("weights/public", True)]
    runs = await bob.fetch("training_runs", params={"access_scope": "accessible", "limit": 100})
    assert run_id in [found["training_run_id"] for found in runs["training_runs"]]
    for method, rest in (("DELETE", ""), ("POST", "/publish"), ("DELETE", "/publish")):
        assert (await bob.send(method, place(path) + rest)).status_code == 404
    assert (await ada.send("DELETE", f"{place(path)}/publish")).status_code == 204
    assert (await bob.get(f"training_runs/{run_id}", **accessible)).status_code == 404


async def test_publishing_what_is_public_and_unpublishing_what_is_private_is_a_conflict(ada, bob):
    run_id, path = await saved(ada, "switched")
    address = f"{place(path)}/publish"

    async def is_public():
        return (await ada.fetch(f"training_runs/{run_id}/checkpoints"))["checkpoints"][0]["public"]

    for method, code, public in (("DELETE", "already_private", False), ("POST", "already_public", True)):
        if public:
            assert (await ada.send(method, address, headers={"x-idempotency-key": "once"})).status_code == 204
        refused = await ada.send(method, address)
        assert (refused.status_code, refused.json()["code"]) == (409, code)
        assert path in refused.json()["detail"]
        assert refused.headers["x-should-retry"] == "false", "the SDK sends it again otherwise"
        assert await is_public() == public
    again = await ada.send("POST", address, headers={"x-idempotency-key": "once"})
    assert again.status_code == 204, "the answer to the request that did it may have been lost"
    assert (await bob.send("POST", address)).status_code == 404, "which tells others nothing"
    events = (await ada.fetch("audit", params={"event_type": "checkpoints"}))["entries"]
    assert [entry["event"] for entry in events if entry["tinker_path"] == path].count("checkpoint_published") == 1


async def test_end_of_a_checkpoint_is_set_and_removed(ada):
    run_id, path = await saved(ada)

    async def expires_at():
        return (await ada.fetch(f"training_runs/{run_id}/checkpoints"))["checkpoints"][0]["expires_at"]

    assert await expires_at() is None
    assert (await ada.send("PUT", f"{place(path)}/ttl", {"ttl_seconds": 7200})).status_code == 204
    left = datetime.fromisoformat(await expires_at()) - datetime.now(UTC)
    assert timedelta(seconds=7100) < left <= timedelta(seconds=7200)
    assert (await ada.send("PUT", f"{place(path)}/ttl", {"ttl_seconds": None})).status_code == 204
    assert await expires_at() is None
    for value in (0, 3599, -5, 10**10):
        response = await ada.send("PUT", f"{place(path)}/ttl", {"ttl_seconds": value})
        assert response.status_code == 400
        assert str(value) in response.json()["detail"]
    assert (await ada.send("PUT", f"{place(path)}/ttl", {})).status_code == 422


async def test_deleted_checkpoint_is_gone(ada):
    run_id, path = await saved(ada)
    assert (await ada.send("DELETE", place(path))).status_code == 204
    assert (await ada.send("DELETE", place(path))).status_code == 404
    assert (await ada.fetch(f"training_runs/{run_id}/checkpoints"))["checkpoints"] == []
    assert (await ada.post("weights_info", {"tinker_path": path})).status_code == 404
    await ada.save(run_id, 2, "one")


async def test_copy_into_a_project_is_made_once_and_needs_no_source(ada):
    run_id, path = await saved(ada, "original", user_metadata={"k": "v"})
    body = {"source_path": path, "destination_project_id": "other", "ttl_seconds": 3600}
    key = {"headers": {"x-idempotency-key": "7b4c"}}
    first, again = await ada.ok("copy_weights", body, **key), await ada.ok("copy_weights", body, **key)
    assert first == again
    assert (await ada.ok("copy_weights", body, headers={"x-idempotency-key": "other"})) != first
    copied = first["tinker_path"]
    assert copied.endswith("/weights/original")
    assert not copied.startswith(f"tinker://{run_id}/")
    assert (await ada.send("DELETE", place(path))).status_code == 204
    session_id = await ada.session()
    load = {"session_id": session_id, "model_seq_id": 0, "path": copied, "optimizer": True}
    model_id = (await ada.result(await ada.ok("load_weights", load)))["model_id"]
    await ada.train(model_id, 1)
    copy_run = copied.removeprefix("tinker://").partition("/")[0]
    run = await ada.fetch(f"training_runs/{copy_run}")
    assert run["last_checkpoint"]["user_metadata"] == {"k": "v"}
    assert run["last_checkpoint"]["expires_at"] is not None
    response = await ada.post("optim_step", {"model_id": copy_run, "seq_id": 1, "adam_params": {}})
    assert response.status_code == 400
    assert "copied" in response.json()["detail"]


async def test_copy_into_a_session_across_users(server, ada, bob):
    _, path = await saved(ada, "original")
    session_id = await bob.session()
    body = {"source_path": path, "session_id": session_id, "model_seq_id": 2}
    assert (await bob.post("copy_weights", body)).status_code == 404
    token = server.secrets["ada"]
    copied = await bob.ok("copy_weights", body | {"weights_access_token": token})
    assert copied == {"tinker_path": f"tinker://{session_id}:train:2/weights/original"}
    named = {"source_path": path, "destination_project_id": "p"}
    headers = {"x-tinker-weights-access-token": token}
    assert (await bob.ok("copy_weights", named, headers=headers))["tinker_path"] != path
    assert (await ada.send("DELETE", place(copied["tinker_path"]))).status_code == 404, "it is bob's"


async def test_copy_does_not_take_the_place_of_a_run(ada):
    run_id, path = await saved(ada)
    body = {"source_path": path, "session_id": run_id.partition(":")[0], "model_seq_id": 0}
    assert (await ada.post("copy_weights", body)).status_code == 400
    await ada.train(run_id, 2)


@pytest.mark.parametrize(
    ("fields", "status", "word"),
    [
        ({"source_path": "tinker://x/weights"}, 400, "tinker://"),
        ({"source_path": "tinker://x:train:0/weights/y"}, 404, "x:train:0"),
        ({"session_id": "none", "model_seq_id": 0}, 404, "none"),
        ({"ttl_seconds": 5}, 400, "ttl_seconds"),
    ],
    ids=["path", "source", "session", "ttl"],
)
async def test_bad_copy_is_refused(ada, fields, status, word):
    _, path = await saved(ada)
    response = await ada.post("copy_weights", {"source_path": path, **fields})
    assert response.status_code == status, response.text
    assert word in response.json()["detail"]


@pytest.mark.parametrize(
    "rest",
    ["weights/..", "weights/%2e%2e%2fx", "weights/a%00b", "other/x", "weights/" + "x" * 300, "weights/%252e"],
    ids=["dots", "escaped", "NUL", "segment", "long", "twice escaped"],
)
async def test_names_that_are_none_are_not_found(ada, rest):
    run_id = await ada.run()
    for method, tail in (("DELETE", ""), ("POST", "/publish"), ("GET", "/archive"), ("GET", "/external_weights_urls")):
        response = await ada.send(method, f"training_runs/{run_id}/checkpoints/{rest}{tail}")
        assert response.status_code in (400, 404, 405), response.text
        assert response.json().keys() == {"detail", "code", "request_id"}


@pytest.mark.parametrize(
    "query", [{"limit": "-1"}, {"limit": "x"}, {"limit": 10**6}, {"offset": "1.5"}, {"limit": "٣"}]
)
async def test_bad_pages_are_refused(ada, query):
    for path in ("training_runs", "checkpoints", "sessions"):
        response = await ada.get(path, params=query)
        assert response.status_code == 400
        assert next(iter(query)) in response.json()["detail"]
    assert (await ada.get("training_runs", params={"access_scope": "all"})).status_code == 400
