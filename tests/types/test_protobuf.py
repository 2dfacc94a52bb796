"""The protobuf messages: field for field the official ones, and able to live beside them."""

import os
import subprocess
import sys

import pytest
from tinker.proto import tinker_public_pb2 as official

from lorimer.types import tinker_pb2 as ours


def describe(message) -> dict[str, tuple]:
    """Everything about a message that is on the wire, and whether a field can be told from its default."""
    return {
        field.name: (
            field.number,
            field.type,
            field.is_repeated,
            field.has_presence,
            field.message_type.name if field.message_type else field.enum_type.name if field.enum_type else None,
            field.containing_oneof.name if field.containing_oneof else None,
        )
        for field in message.fields
    }


def messages(file) -> dict[str, object]:
    found = dict(file.message_types_by_name)
    for name, message in file.message_types_by_name.items():
        found |= {f"{name}.{nested.name}": nested for nested in message.nested_types}
    return found


def test_messages_are_the_official_ones():
    assert messages(ours.DESCRIPTOR).keys() == messages(official.DESCRIPTOR).keys()
    for name, message in messages(official.DESCRIPTOR).items():
        assert describe(messages(ours.DESCRIPTOR)[name]) == describe(message), name


@pytest.mark.parametrize("name", ["StopReason", "DType"])
def test_enums_are_the_official_ones(name):
    assert getattr(ours, name).items() == getattr(official, name).items()


def test_both_live_in_one_process():
    assert ours.DESCRIPTOR.package != official.DESCRIPTOR.package
    data = ours.SampleResponse(prompt_cache_hit_tokens=3).SerializeToString()
    assert official.SampleResponse.FromString(data).prompt_cache_hit_tokens == 3


def test_messages_work_in_the_pure_python_runtime():
    code = """
from google.protobuf.internal import api_implementation
assert api_implementation.Type() == "python"
from lorimer.types import Datum, ModelInput, TrainingRequest
from lorimer.types.encoding import decode_training_request, encode_training_request
datum = Datum(ModelInput.from_ints([1, 2]), {"target_tokens": [2, 3]})
body = encode_training_request(TrainingRequest("m", 1, [datum], "cross_entropy", {"a": 1.0, "b": "c"}))
found = decode_training_request(body, "application/x-protobuf")
assert found.data[0].loss_fn_inputs["target_tokens"].data == [2, 3] and found.loss_fn_config == {"a": 1.0, "b": "c"}
"""
    environment = os.environ | {"PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION": "python"}
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=60)
    assert run.returncode == 0, run.stderr
