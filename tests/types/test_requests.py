"""Requests in JSON: those of old and new releases, and what is refused."""

import json
import math
from datetime import UTC, datetime

import numpy as np
import pydantic
import pytest
from tinker import types as official

from lorimer import types as ours
from lorimer.errors import InvalidInput
from lorimer.types import explain, validate
from lorimer.types.base import Request
from lorimer.types.optim import OPTIMIZERS, make_params

# What releases up to 0.16 send: no ``type``, no defaults, and null where the program passed None.
OLD = {
    "create_session": (ours.CreateSessionRequest, {"tags": [], "user_metadata": None, "sdk_version": "0.7.0"}),
    "create_session without metadata": (ours.CreateSessionRequest, {"tags": ["a"], "sdk_version": "0.7.0"}),
    "create_model": (
        ours.CreateModelRequest,
        {"session_id": "s", "model_seq_id": 0, "base_model": "b", "lora_config": {"rank": 8, "seed": None}},
    ),
    "create_model all null": (
        ours.CreateModelRequest,
        {
            "session_id": "s",
            "model_seq_id": 0,
            "base_model": "b",
            "user_metadata": None,
            "lora_config": None,
        },
    ),
    "optim_step": (ours.OptimStepRequest, {"adam_params": {"learning_rate": 0.001}, "model_id": "m", "seq_id": 7}),
    "asample": (
        ours.SampleRequest,
        {
            "num_samples": 2,
            "prompt": {"chunks": [{"tokens": [1, 2, 3]}]},
            "sampling_params": {"max_tokens": 3, "stop": ["x"]},
            "sampling_session_id": "s",
            "seq_id": 0,
            "prompt_logprobs": True,
            "topk_prompt_logprobs": 1,
        },
    ),
    "asample all null": (
        ours.SampleRequest,
        {
            "prompt": {"chunks": []},
            "sampling_params": {"max_tokens": None, "seed": None, "stop": None},
            "prompt_logprobs": None,
            "target_prompt_logprobs": None,
        },
    ),
    "save": (ours.SaveWeightsRequest, {"model_id": "m", "path": "a", "seq_id": 3, "ttl_seconds": None}),
    "poll": (ours.FutureRetrieveRequest, {"request_id": "r"}),
    "heartbeat": (ours.SessionHeartbeatRequest, {"session_id": "s"}),
    "telemetry": (
        ours.TelemetrySendRequest,
        {"events": [], "platform": "Linux", "sdk_version": "0.7.0", "session_id": "s"},
    ),
    "finish": (ours.FinishSessionRequest, {"reason": {"type": "errored"}, "detail": None}),
}


@pytest.mark.parametrize(("model", "values"), OLD.values(), ids=OLD)
def test_absent_null_and_default_are_the_same(model, values):
    request = validate(model, values)
    for name, field in model.model_fields.items():
        if values.get(name) is None and not field.is_required():
            assert getattr(request, name) == field.get_default(call_default_factory=True)
    assert validate(model, request.model_dump(mode="json", exclude_none=True)) == request
    assert validate(model, request.model_dump(mode="json")) == request


def test_parameters_of_a_sample_have_their_defaults():
    request = validate(*OLD["asample all null"])
    assert request.sampling_params == ours.SamplingParams()
    assert (request.num_samples, request.topk_prompt_logprobs) == (1, 0)


def request_types(kind: type = Request) -> list[type[Request]]:
    return [found for child in kind.__subclasses__() for found in (child, *request_types(child))]


NOT_NULL = [
    (model, name)
    for model in [*request_types(), ours.SamplingParams]
    for name, field in model.model_fields.items()
    if not field.is_required() and field.get_default(call_default_factory=True) is not None
]


@pytest.mark.parametrize(("model", "name"), NOT_NULL, ids=lambda item: getattr(item, "__name__", item))
def test_null_is_no_value_of_a_field_with_another_default(model, name):
    """NaN and infinity arrive as null; the default in their place would be a number that nobody gave."""
    with pytest.raises(pydantic.ValidationError) as raised:
        model.model_validate({name: None})
    assert name in [error["loc"][0] for error in raised.value.errors()]


def test_fields_that_the_official_sdk_may_send_as_null_are_known():
    """Where the official type has None, ours has it too, so that no release is refused."""
    assert len(NOT_NULL) > 40
    for model, name in NOT_NULL:
        theirs = getattr(official, model.__name__, None)
        if theirs is not None and name in theirs.model_fields:
            with pytest.raises(pydantic.ValidationError):
                pydantic.TypeAdapter(theirs.model_fields[name].annotation).validate_python(None)


NEW = {
    "create_session": official.CreateSessionRequest(tags=["t"], user_metadata={"a": 1}, sdk_version="0.36.0"),
    "create_model": official.CreateModelRequest(
        session_id="s", model_seq_id=1, base_model="b", lora_config=official.LoraConfig(rank=4, train_mlp=False)
    ),
    "create_model dimuon": official.CreateModelRequest(
        session_id="s", model_seq_id=1, base_model="b", optimizer_config=official.DimuonOptimizerConfig()
    ),
    "get_info": official.GetInfoRequest(model_id="m"),
    "optim_step": official.OptimStepRequest(optim_params=official.AdamParams(eps=1e-8), model_id="m", seq_id=2),
    "optim_step dimuon": official.OptimStepRequest(optim_params=official.DimuonParams(learning_rate=0.1), model_id="m"),
    "save_weights": official.SaveWeightsRequest(model_id="m", path="n", ttl_seconds=3600, user_metadata={"a": "b"}),
    "save_weights_for_sampler": official.SaveWeightsForSamplerRequest(model_id="m", sampling_session_seq_id=3),
    "save_weights_external": official.SaveWeightsExternalRequest(model_id="m", path="n", seq_id=1),
    "load_weights": official.LoadWeightsRequest(
        session_id="s", model_seq_id=0, path="tinker://m/weights/a", optimizer=True
    ),
    "copy_weights": official.CopyWeightsRequest(source_path="tinker://m/weights/a", destination_project_id="p"),
    "create_sampling_session": official.CreateSamplingSessionRequest(
        session_id="s", sampling_session_seq_id=0, base_model="b"
    ),
    "join": official.JoinSamplingSessionRequest(sampling_session_id="s"),
    "sample": official.SampleRequest(
        prompt=official.ModelInput.from_ints([1, 2, 3]),
        sampling_params=official.SamplingParams(stop=[5, 6], max_tokens=3, seed=1),
        seq_id=10**18,
        target_prompt_logprobs={"data": [1, -1], "dtype": "int64", "shape": [2, 1]},
    ),
    "retrieve_future": official.FutureRetrieveRequest(request_id="r", allow_metadata_only=True),
    "retrieve_futures": official.FuturesRetrieveRequest(
        target=official.SamplingSessionFuturesTarget(sampling_session_id="s", cloned_sampler_id=4),
        retrieved_request_ids=["a"],
    ),
    "create_custom_loss": official.CreateCustomLossRequest(
        session_id="s",
        custom_loss_seq_id=0,
        name="f",
        inputs=[official.CustomLossInput(name="logprobs", rank=1)],
        graph=official.CustomLossGraph(
            nodes=[official.CustomLossNode(op="output", name="o", target="output", args=[{"ref": "x"}])]
        ),
    ),
    "search": official.SessionSearchRequest(
        display_name="a",
        owner=official.UserSearchOwner(owner_urns=["u"]),
        statuses=[official.ClientFinishedSessionStatusQuery(reasons=["errored"]), official.ActiveSessionStatusQuery()],
        cursor=official.SessionSearchCursor(last_created_at=datetime(2026, 1, 1, tzinfo=UTC), last_session_id="s"),
    ),
    "telemetry": official.TelemetrySendRequest(
        events=[
            official.UnhandledExceptionEvent(
                event="UNHANDLED_EXCEPTION",
                event_id="e",
                event_session_index=0,
                severity="ERROR",
                timestamp=datetime(2026, 1, 1, tzinfo=UTC),
                error_type="t",
                error_message="m",
            ),
            official.SessionStartEvent(
                event="SESSION_START",
                event_id="e",
                event_session_index=0,
                severity="INFO",
                timestamp=datetime(2026, 1, 1, tzinfo=UTC),
            ),
        ],
        platform="Linux",
        sdk_version="0.36.0",
        session_id="s",
        process_uuid="p",
    ),
}


@pytest.mark.parametrize("exclude_none", [True, False], ids=["without nulls", "with nulls"])
@pytest.mark.parametrize("request_", NEW.values(), ids=NEW)
def test_request_of_the_official_sdk_is_read_and_written_alike(request_, exclude_none):
    sent = request_.model_dump(mode="json", exclude_none=exclude_none)
    request = validate(getattr(ours, type(request_).__name__), sent)
    written = request.model_dump(mode="json", exclude_none=True)
    assert written == request_.model_dump(mode="json", exclude_none=True)


BASE = {"prompt": {"chunks": []}, "sampling_params": {}}
ADAM = {"model_id": "m", "adam_params": {}}
WRONG = {
    "an unknown field": (ours.SampleRequest, BASE | {"n": 2}, r"^n: .*\(got 2\)"),
    "an unknown null": (ours.SampleRequest, BASE | {"n": None}, "^n: "),
    "a missing field": (ours.SampleRequest, {"prompt": {"chunks": []}}, "^sampling_params: field required$"),
    "an unknown parameter": (ours.SampleRequest, BASE | {"sampling_params": {"min_p": 0.1}}, "'min_p'.*temperature"),
    "nan": (ours.SampleRequest, BASE | {"sampling_params": {"temperature": math.nan}}, r"temperature: .*finite.*nan"),
    "infinity": (ours.OptimStepRequest, ADAM | {"adam_params": {"eps": math.inf}}, r"eps: .*finite"),
    "nan for dimuon": (
        ours.OptimStepRequest,
        {"model_id": "m", "optimizer_params": {"type": "dimuon", "learning_rate": math.nan}},
        "learning_rate",
    ),
    "an integer of 65 bits": (ours.SampleRequest, BASE | {"seq_id": 2**64}, "^seq_id: "),
    "a negative seq_id": (ours.SampleRequest, BASE | {"seq_id": -1}, "^seq_id: "),
    "a huge count": (ours.SampleRequest, BASE | {"num_samples": 10**30}, "^num_samples: "),
    "stops of two kinds": (ours.SampleRequest, BASE | {"sampling_params": {"stop": ["a", 1]}}, "stop"),
    "numbers as text": (ours.SampleRequest, BASE | {"sampling_params": {"stop": [1, "2"]}}, "stop"),
    "another type": (ours.GetInfoRequest, {"model_id": "m", "type": "sample"}, "^type: .*'get_info'"),
    "adam and others": (ours.OptimStepRequest, ADAM | {"optimizer_params": {"type": "dimuon"}}, "optimizer_params"),
    "no optimiser": (ours.OptimStepRequest, {"model_id": "m", "adam_params": None}, "field required"),
    "a target of fractions": (
        ours.SampleRequest,
        BASE | {"target_prompt_logprobs": {"data": [0.5], "dtype": "int64"}},
        "target_prompt_logprobs: .*list of integers",
    ),
    "metadata of numbers": (ours.SaveWeightsRequest, {"model_id": "m", "user_metadata": {"a": 1}}, r"user_metadata\.a"),
    "no body": (ours.GetInfoRequest, None, "dictionary"),
    "a list": (ours.GetInfoRequest, [], "dictionary"),
    "ttl left out": (ours.SetTtlRequest, {}, "ttl_seconds: field required"),
    "a naive cursor": (
        ours.SessionSearchRequest,
        {"cursor": {"last_created_at": "2026-01-01T00:00:00", "last_session_id": "s"}},
        "timezone",
    ),
}


@pytest.mark.parametrize(("model", "values", "message"), WRONG.values(), ids=WRONG)
def test_wrong_request_is_refused(model, values, message):
    with pytest.raises(InvalidInput, match=message):
        validate(model, values)


def test_errors_are_short_and_name_the_place():
    with pytest.raises(InvalidInput) as raised:
        validate(ours.SampleRequest, BASE | {f"field_{i}": "x" * 10_000 for i in range(1000)}, "body")
    assert len(str(raised.value)) < 600
    assert str(raised.value).startswith("body.field_0: ")
    assert "field_1" not in str(raised.value)


def test_explain_reads_any_validation_error():
    class Pair(pydantic.BaseModel):
        items: list[int]

    with pytest.raises(pydantic.ValidationError) as raised:
        Pair.model_validate({"items": [1, "a"]})
    assert explain(raised.value).startswith("items[1]: input should be a valid integer")


def test_deep_json_is_refused():
    deep: object = 1
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(InvalidInput):
        validate(ours.SampleRequest, BASE | {"prompt": deep})


def test_null_keeps_a_checkpoint_for_ever():
    assert validate(ours.SetTtlRequest, {"ttl_seconds": None}).ttl_seconds is None


@pytest.mark.parametrize("stop", [None, [], "x", ["a", "b"], [1, 2]], ids=repr)
def test_stop_keeps_its_kind(stop):
    assert validate(ours.SampleRequest, BASE | {"sampling_params": {"stop": stop}}).sampling_params.stop == stop


def test_sampling_params_ignore_unknown_names_in_a_program_as_officially():
    parameters = {"temperature": 0.5, "presence_penalty": 1}
    assert not hasattr(ours.SamplingParams(**parameters), "presence_penalty")


def test_requests_take_numpy_numbers():
    assert ours.AdamParams(learning_rate=np.float32(0.5)).learning_rate == 0.5


OPTIMISERS = {
    "adam without type": ({"adam_params": {}}, ours.AdamParams()),
    "adam with type": ({"optimizer_params": {"type": "adamw", "eps": 0.5}}, ours.AdamParams(eps=0.5)),
    "the program's name": ({"optim_params": {"beta1": 0.5}}, ours.AdamParams(beta1=0.5)),
    "adam with multipliers": (
        {"optimizer_params": {"type": "adamw", "lr_multipliers": {"lora_B": 16}}},
        ours.AdamWParams(lr_multipliers={"lora_B": 16}),
    ),
    "sgd": ({"optimizer_params": {"type": "sgd", "nesterov": True}}, ours.SgdParams(nesterov=True)),
    "muon": ({"optimizer_params": {"type": "muon", "ns_steps": 6}}, ours.MuonParams(ns_steps=6)),
    "null beside it": ({"adam_params": None, "optimizer_params": {"type": "unknown", "momentum": 0.5}}, None),
    "dimuon": ({"optimizer_params": {"type": "dimuon", "learning_rate": 1}}, ours.DimuonParams(learning_rate=1)),
}


@pytest.mark.parametrize(("values", "params"), OPTIMISERS.values(), ids=OPTIMISERS)
def test_parameters_of_a_step_are_read_under_every_name(values, params):
    request = validate(ours.OptimStepRequest, {"model_id": "m", "seq_id": 1} | values)
    if params is None:
        assert request.model_dump(mode="json")["optimizer_params"] == {"type": "unknown", "momentum": 0.5}
    else:
        assert request.optim_params == params


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_parameters_of_every_family_survive_the_wire_and_have_no_other_fields(kind):
    params = make_params(kind, learning_rate=0.5, grad_clip_norm=1.0, lr_multipliers={"attn": 2.0})
    written = ours.OptimStepRequest(optim_params=params, model_id="m", seq_id=1).model_dump(mode="json")
    assert written["optimizer_params"]["type"] == kind
    assert validate(ours.OptimStepRequest, json.loads(json.dumps(written))).optim_params == params
    written["optimizer_params"]["amsgrad"] = True
    with pytest.raises(InvalidInput, match="amsgrad"):
        validate(ours.OptimStepRequest, written)


def test_responses_ignore_what_they_do_not_know():
    assert ours.UntypedAPIFuture.model_validate({"request_id": "r", "new": 1}).request_id == "r"


def test_models_do_not_change():
    with pytest.raises(pydantic.ValidationError):
        ours.AdamParams().eps = 1.0
