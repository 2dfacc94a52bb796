"""Every message crosses the border as it was; what is not of its type does not cross.

Values are drawn at random from the declared types, so a new message or field is covered as soon as it is declared.
"""

import math
import types
import typing

import msgspec
import numpy as np
import pytest

from lorimer.engine import messages
from lorimer.engine.messages import (
    CreateRun,
    Done,
    ForwardBackward,
    GetStatus,
    LoraConfig,
    Message,
    OptimStep,
    RegisterLoss,
    SampleProgress,
    SampleRequest,
    SamplingParams,
    StateResult,
    TrainBatch,
    decode_command,
    decode_part,
    decode_reply,
    encode,
)

COMMANDS = typing.get_args(messages.Command)
REPLIES = typing.get_args(messages.Reply)
BETWEEN_RANKS = typing.get_args(messages.RankMessage)
DTYPES = ("float32", "float64", "int32", "int64", "bool", "uint8")
SHAPES = ((), (0,), (1,), (7,), (0, 3), (3, 0), (2, 5), (2, 3, 4))
CHARACTERS = list("aZ0/:.-_ \n\x00é漢\U0001f40e")
INTEGERS = [0, 1, -1, 255, 2**31, -(2**31) - 1, 2**63 - 1, -(2**63), 2**64 - 1]
FLOATS = [0.0, -0.0, 1.5, -1e308, 5e-324, math.inf, -math.inf, math.nan]


def make_array(rng, dtype, shape):
    raw = rng.integers(0, 256, (*shape, np.dtype(dtype).itemsize), dtype=np.uint8)
    return raw.astype(bool)[..., 0] if dtype == "bool" else np.frombuffer(raw.tobytes(), dtype).reshape(shape)


def make(kind, rng):
    """A random value of the type ``kind``."""
    origin, parts = typing.get_origin(kind), typing.get_args(kind)
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return kind(**{field.name: make(field.type, rng) for field in msgspec.structs.fields(kind)})
    if origin in (types.UnionType, typing.Union):
        return make(parts[rng.integers(len(parts))], rng)
    if origin is typing.Literal:
        return parts[rng.integers(len(parts))]
    if origin is list:
        return [make(parts[0], rng) for _ in range(rng.integers(0, 4))]
    if origin is tuple:
        return tuple(make(part, rng) for part in parts)
    if origin is dict:
        return {make(parts[0], rng): make(parts[1], rng) for _ in range(rng.integers(0, 4))}
    makers = {
        str: lambda: "".join(rng.choice(CHARACTERS, rng.integers(0, 6))),
        int: lambda: INTEGERS[rng.integers(len(INTEGERS))],
        float: lambda: FLOATS[rng.integers(len(FLOATS))],
        bool: lambda: bool(rng.integers(2)),
        bytes: lambda: rng.bytes(rng.integers(0, 6)),
        type(None): lambda: None,
        msgspec.UnsetType: lambda: msgspec.UNSET,
        np.ndarray: lambda: make_array(rng, rng.choice(DTYPES), SHAPES[rng.integers(len(SHAPES))]),
        typing.Any: lambda: make(list[dict[str, int | str | None]], rng),
    }
    return makers[kind]()


def assert_same(found, expected):
    assert type(found) is type(expected)
    if isinstance(expected, msgspec.Struct):
        for name in expected.__struct_fields__:
            assert_same(getattr(found, name), getattr(expected, name))
    elif isinstance(expected, np.ndarray):
        assert (found.dtype, found.shape, found.tobytes()) == (expected.dtype, expected.shape, expected.tobytes())
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected)
        for pair in zip(found, expected, strict=True):
            assert_same(*pair)
    elif isinstance(expected, dict):
        assert list(found) == list(expected)
        assert_same(list(found.values()), list(expected.values()))
    elif isinstance(expected, float):
        assert np.float64(found).tobytes() == np.float64(expected).tobytes()
    else:
        assert found == expected


@pytest.mark.parametrize(
    ("kind", "decode"),
    [
        *((kind, decode_command) for kind in COMMANDS),
        *((kind, decode_reply) for kind in REPLIES),
        *((kind, decode_part) for kind in BETWEEN_RANKS),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_every_message_comes_back_as_it_was(kind, decode):
    rng = np.random.default_rng(0)
    for _ in range(50):
        message = make(kind, rng)
        assert_same(decode(encode(message)), message)


def test_every_message_is_a_command_a_reply_or_one_between_ranks_or_part_of_one():
    declared = {value for value in vars(messages).values() if isinstance(value, type) and issubclass(value, Message)}
    reached: set = set()

    def reach(kind):
        for part in typing.get_args(kind):
            reach(part)
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct) and kind not in reached:
            reached.add(kind)
            for field in msgspec.structs.fields(kind):
                reach(field.type)

    reach(messages.Command)
    reach(messages.Reply)
    reach(messages.RankMessage)
    assert reached == declared - {Message}


def sent(array):
    """The array as it comes out at the other end."""
    command = decode_command(encode(SampleRequest(request_id="r", prompt=array)))
    assert isinstance(command, SampleRequest)
    return command.prompt


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_arrays_keep_type_shape_and_bits(dtype, shape):
    array = make_array(np.random.default_rng(1), dtype, shape)
    assert_same(sent(array), array)


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x.T,
        lambda x: x[::2, 1::3],
        lambda x: x[::-1],
        np.asfortranarray,
        lambda x: np.broadcast_to(x[0], (3, 7)),
    ],
    ids=["transposed", "strided", "reversed", "fortran", "broadcast"],
)
def test_arrays_of_any_layout_arrive_by_value(view):
    array = view(np.arange(42, dtype=np.int32).reshape(6, 7))
    found = sent(array)
    assert found.dtype == array.dtype
    assert np.array_equal(found, array)


def test_a_big_array_is_sent_as_its_bytes():
    array = np.arange(4_000_000, dtype=np.int64)
    assert len(encode(SampleRequest(request_id="r", prompt=array))) < array.nbytes + 1000
    assert np.array_equal(sent(array), array)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (np.array([object()]), "an array of object"),
        (np.array(["a"]), "an array of <U1"),
        (np.array([1j]), "an array of complex128"),
        (np.array([1], np.float16), "an array of float16"),
        (np.array([1], ">f4"), "an array of >f4"),
        (np.array([1], np.uint64), "an array of uint64"),
        (np.float32(1), "a float32"),
        (object(), "a object"),
    ],
    ids=["object", "text", "complex", "float16", "big-endian", "uint64", "scalar", "not-an-array"],
)
def test_what_has_no_encoding_is_refused(value, message):
    with pytest.raises(TypeError, match=f"cannot send {message}"):
        encode(SampleRequest(request_id="r", prompt=value))


def untyped(value):
    """What mypy would not let pass."""
    return value


@pytest.mark.parametrize(
    ("command", "where"),
    [
        (OptimStep(request_id=untyped(1), model_id="m"), "$.request_id"),
        (OptimStep(request_id="r", model_id="m", params={"learning_rate": untyped(None)}), "$.params"),
        (CreateRun(request_id="r", model_id="m", lora=LoraConfig(rank=untyped(1.5))), "$.lora.rank"),
        (CreateRun(request_id="r", model_id="m", lora=untyped(StateResult())), "$.lora"),
        (SampleRequest(request_id="r", prompt=untyped([1, 2])), "expected ndarray, got list - at `$.prompt"),
        (SampleRequest(request_id="r", prompt=untyped(None)), "$.prompt"),
        (
            SampleRequest(request_id="r", prompt=np.arange(2), params=SamplingParams(stop=untyped([1.5]))),
            "$.params.stop",
        ),
        (TrainBatch(operations=untyped([GetStatus(request_id="r")])), "$.operations"),
        (
            TrainBatch(operations=[ForwardBackward(request_id="r", model_id="m", data=untyped([{}]), loss_fn="x")]),
            "$.operations",
        ),
        (RegisterLoss(request_id="r", loss_id="l", inputs=untyped([("logprobs",)]), graph={}), "$.inputs"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_a_field_of_another_type_is_refused_by_its_place(command, where):
    with pytest.raises(msgspec.ValidationError) as refusal:
        decode_command(encode(command))
    assert where in str(refusal.value)


def test_unknown_fields_and_kinds_are_refused():
    command = msgspec.msgpack.decode(encode(GetStatus(request_id="r")))
    assert_same(decode_command(msgspec.msgpack.encode(command)), GetStatus(request_id="r"))
    with pytest.raises(msgspec.ValidationError, match="unknown field `colour`"):
        decode_command(msgspec.msgpack.encode(command | {"colour": "red"}))
    with pytest.raises(msgspec.ValidationError, match="Invalid value 'Explode'"):
        decode_command(msgspec.msgpack.encode(command | {"kind": "Explode"}))
    with pytest.raises(msgspec.ValidationError, match="missing required field `request_id`"):
        decode_command(msgspec.msgpack.encode({"kind": "GetStatus"}))


def test_commands_and_replies_do_not_pass_for_one_another():
    with pytest.raises(msgspec.ValidationError):
        decode_reply(encode(GetStatus(request_id="r")))
    with pytest.raises(msgspec.ValidationError):
        decode_command(encode(Done(request_id="r", result=StateResult())))
    progress = SampleProgress(request_id="r", index=0, tokens=[], logprobs=[])
    with pytest.raises(msgspec.ValidationError):
        decode_reply(encode(Done(request_id="r", result=untyped(progress))))


@pytest.mark.parametrize("size", [5, 2**62])
def test_a_declared_size_is_not_believed(size):
    array = msgspec.msgpack.Ext(1, b"\x00\x01" + size.to_bytes(8, "little"))
    command = {"kind": "SampleRequest", "request_id": "r", "prompt": array}
    with pytest.raises(ValueError, match="cannot reshape"):
        decode_command(msgspec.msgpack.encode(command))
