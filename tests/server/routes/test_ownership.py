"""Others' objects do not exist: the same status and sentence as for an id nobody ever had."""

import pytest

from .conftest import MODEL, sample_body

pytestmark = pytest.mark.asyncio(loop_scope="session")

CALLS = {
    "heartbeat": ("POST", "session_heartbeat", {"session_id": "{session}"}),
    "finish": ("POST", "sessions/{session}/finish", {"reason": {"type": "success"}, "detail": None}),
    "get session": ("GET", "sessions/{session}", None),
    "get accessible session": ("GET", "sessions/{session}?access_scope=accessible", None),
    "assign project": ("PUT", "sessions/{session}/project", {"project_id": "p"}),
    "export trace": ("GET", "sessions/{session}/trace_export", None),
    "create model": ("POST", "create_model", {"session_id": "{session}", "model_seq_id": 9, "base_model": MODEL}),
    "create sampling session": (
        "POST",
        "create_sampling_session",
        {"session_id": "{session}", "sampling_session_seq_id": 9, "base_model": MODEL},
    ),
    "create custom loss": (
        "POST",
        "create_custom_loss",
        {
            "session_id": "{session}",
            "custom_loss_seq_id": 0,
            "name": "n",
            "inputs": [],
            "graph": {"format": 1, "nodes": []},
        },
    ),
    "create from weights": (
        "POST",
        "load_weights",
        {"session_id": "{session}", "model_seq_id": 9, "path": "{path}", "optimizer": False},
    ),
    "copy into session": (
        "POST",
        "copy_weights",
        {"session_id": "{session}", "model_seq_id": 9, "source_path": "{path}"},
    ),
    "get info": ("POST", "get_info", {"model_id": "{run}"}),
    "forward_backward": (
        "POST",
        "forward_backward",
        {
            "model_id": "{run}",
            "seq_id": 2,
            "forward_backward_input": {"data": [], "loss_fn": "cross_entropy"},
        },
    ),
    "forward": (
        "POST",
        "forward",
        {"model_id": "{run}", "seq_id": 2, "forward_input": {"data": [], "loss_fn": "cross_entropy"}},
    ),
    "optim_step": ("POST", "optim_step", {"model_id": "{run}", "seq_id": 2, "adam_params": {}}),
    "save_weights": ("POST", "save_weights", {"model_id": "{run}", "seq_id": 2, "path": "n"}),
    "save for sampler": ("POST", "save_weights_for_sampler", {"model_id": "{run}", "seq_id": 2, "path": "n"}),
    "export": ("POST", "save_weights_external", {"model_id": "{run}", "seq_id": 2, "path": "n"}),
    "load_weights": ("POST", "load_weights", {"model_id": "{run}", "seq_id": 2, "path": "{path}", "optimizer": False}),
    "unload": ("POST", "unload_model", {"model_id": "{run}"}),
    "get run": ("GET", "training_runs/{run}", None),
    "get accessible run": ("GET", "training_runs/{run}?access_scope=accessible", None),
    "read metrics": ("GET", "training_runs/{run}/metrics", None),
    "report metrics": ("POST", "training_runs/{run}/metrics", {"points": [{"step": 1, "values": {"a": 1}}]}),
    "list operations": ("GET", "training_runs/{run}/operations", None),
    "list checkpoints": ("GET", "training_runs/{run}/checkpoints", None),
    "weights_info": ("POST", "weights_info", {"tinker_path": "{path}"}),
    "copy": ("POST", "copy_weights", {"source_path": "{path}", "destination_project_id": "p"}),
    "publish": ("POST", "training_runs/{run}/checkpoints/weights/{name}/publish", None),
    "unpublish": ("DELETE", "training_runs/{run}/checkpoints/weights/{name}/publish", None),
    "ttl": ("PUT", "training_runs/{run}/checkpoints/weights/{name}/ttl", {"ttl_seconds": 3600}),
    "archive": ("GET", "training_runs/{run}/checkpoints/weights/{name}/archive", None),
    "urls": ("GET", "training_runs/{run}/checkpoints/weights/{name}/external_weights_urls", None),
    "join": ("POST", "join_sampling_session", {"sampling_session_id": "{sampler}"}),
    "sample": ("POST", "asample", sample_body("{sampler}")),
    "get sampler": ("GET", "samplers/{sampler}", None),
    "retrieve_futures": (
        "POST",
        "retrieve_futures",
        {"target": {"type": "sampling_session", "sampling_session_id": "{sampler}"}, "timeout": 0},
    ),
    "delete": ("DELETE", "training_runs/{run}/checkpoints/weights/{name}", None),
}


def filled(value, names):
    if isinstance(value, str):
        return value.format(**names) if "{" in value else value
    if isinstance(value, dict):
        return {key: filled(item, names) for key, item in value.items()}
    return [filled(item, names) for item in value] if isinstance(value, list) else value


async def things(client):
    session_id = await client.session()
    run_id = await client.run(session_id)
    path = await client.save(run_id, 1, "kept")
    sampler_id = await client.sampler(session_id)
    return {"session": session_id, "run": run_id, "path": path, "sampler": sampler_id, "name": "kept"}


def nobodys(names):
    """Ids of the same form that were never given out."""
    other = "f" * len(names["session"])
    return {key: value.replace(names["session"], other) for key, value in names.items()}


async def test_others_objects_look_like_unknown_ones(ada, bob):
    names = await things(ada)
    unknown = nobodys(names)
    seen = {}
    for label, (method, path, body) in CALLS.items():
        answers = []
        for ids in (names, unknown):
            response = await bob.send(method, filled(path, ids), filled(body, ids))
            answer = response.json()
            answer.pop("request_id")
            shown = str(answer)
            for key in ("session", "run", "path", "sampler"):
                shown = shown.replace(ids[key], key)
            answers.append((response.status_code, shown))
        seen[label] = answers
    assert {label: answers for label, answers in seen.items() if answers[0] != answers[1] or answers[0][0] != 404} == {}
    after = await ada.fetch(f"training_runs/{names['run']}/checkpoints")
    assert [(found["checkpoint_id"], found["public"], found["expires_at"]) for found in after["checkpoints"]] == [
        ("weights/kept", False, None)
    ]
    assert (await ada.fetch(f"sessions/{names['session']}"))["training_run_ids"] == [names["run"]]
    await ada.train(names["run"], 2)


async def test_every_call_works_for_its_owner(ada):
    """Otherwise the test above would prove nothing."""
    names = await things(ada)
    refused = {}
    for label, (method, path, body) in CALLS.items():
        response = await ada.send(method, filled(path, names), filled(body, names))
        if response.status_code == 404:
            refused[label] = response.text
    assert refused == {}
