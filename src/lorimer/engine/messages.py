"""The whole protocol between the API process and an engine process.

Every command carries a ``request_id`` and is answered by exactly one ``Done`` or ``Failed`` with the same id
(``TrainBatch`` by one for each of its operations; a streaming ``SampleRequest`` sends ``SampleProgress`` before).
Arrays are NumPy arrays and travel as raw bytes; nothing is pickled. This module does not import torch.
"""

from collections.abc import Iterable
from typing import Any, Literal

import msgspec
import numpy as np

from lorimer.errors import InvalidInput, LorimerError

ImageFormat = Literal["png", "jpeg"]
StepField = int | float | bool | str | list[float] | dict[str, float]
"""A value among the fields of an optimiser's step."""


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True, tag_field="kind", forbid_unknown_fields=True):
    """Base of everything that crosses the border; unknown fields are refused."""


# ── what commands are made of ─────────────────────────────────────────────────────────────────────────


class LoraConfig(Message):
    """Shape of one adapter; alpha is always 32 and the scale alpha / rank, or alpha / sqrt(rank) in rsLoRA."""

    rank: int = 32
    seed: int | None = None
    train_attn: bool = True
    train_mlp: bool = True
    train_unembed: bool = True
    use_rslora: bool | msgspec.UnsetType = msgspec.UNSET
    """Not written unless it is set: the checksums of manifests that were saved without the field stay right."""
    use_dora: bool | msgspec.UnsetType = msgspec.UNSET
    """Train the norm of each row apart from its direction (``adapters/dora.py``); written as ``use_rslora`` is."""


class FullConfig(Message):
    """The parameters of the model that a full run trains, by group."""

    train_attn: bool = True
    train_mlp: bool = True
    train_unembed: bool = True
    train_embed: bool = True
    train_norms: bool = True


class OptimizerConfig(Message):
    """The optimiser of a run, fixed for its life."""

    type: str = "adamw"
    version: int | None = None


class CsrArray(Message):
    """A two-dimensional array in compressed sparse row form; absent cells are zero."""

    values: np.ndarray
    crow_indices: np.ndarray
    col_indices: np.ndarray
    shape: tuple[int, int]


class ImageInput(Message):
    """An image in its file format, which stands before token ``offset`` of the text it came with."""

    data: bytes
    format: ImageFormat
    offset: int
    chunk: int
    """Its place among the chunks of the input, for errors."""
    expected_tokens: int | None = None
    """How many tokens the caller counts it as; another number is an error."""


class Datum(Message):
    """One training example. Position i of ``tokens`` predicts ``target_tokens[i]``.

    The loss inputs count the tokens of the ``images`` too, which ``tokens`` does not hold.
    """

    tokens: np.ndarray
    loss_fn_inputs: dict[str, np.ndarray]
    sparse_inputs: dict[str, CsrArray] = {}
    """Those of the loss inputs that came in sparse form; a name stands in one of the two."""
    images: list[ImageInput] = []


class SamplingParams(Message):
    max_tokens: int | None = None
    """Most new tokens; ``None`` is the room left in the context."""
    seed: int | None = None
    stop: str | list[str | int] | None = None
    """``None`` stops at the model's end-of-sequence tokens, an empty list at nothing."""
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0


# ── commands ──────────────────────────────────────────────────────────────────────────────────────────


class CreateRun(Message):
    """Make a run: a fresh adapter to train, or in an engine of the method ``full`` the base model's own weights."""

    request_id: str
    model_id: str
    lora: LoraConfig | None = None
    full: FullConfig | None = None
    """Given instead of ``lora`` for a full run."""
    optimizer: OptimizerConfig = OptimizerConfig()


class ForwardBackward(Message):
    """One operation of a ``TrainBatch``: datums of one run under one loss."""

    request_id: str
    model_id: str
    data: list[Datum]
    loss_fn: str
    loss_fn_config: dict[str, float | str] = {}
    forward_only: bool = False


class EncodedForwardBackward(Message):
    """The same with its data as the journal has them: a training request in protobuf.

    On the wire ``payload`` is empty here, and follows the batch in a frame of its own, in the order of the operations.
    So the sender copies nothing, and the engine does the decoding.
    """

    request_id: str
    model_id: str
    payload: bytes = b""
    forward_only: bool = False


class TrainBatch(Message):
    """Operations of any runs, losses and ranks, computed together in one packed pass."""

    operations: list[ForwardBackward | EncodedForwardBackward]

    @property
    def payloads(self) -> list[bytes]:
        return [one.payload for one in self.operations if isinstance(one, EncodedForwardBackward)]

    def with_payloads(self, payloads: Iterable[bytes]) -> "TrainBatch":
        """The batch with other payloads in its encoded operations, as many as it has."""
        left = iter(payloads)
        operations = [
            msgspec.structs.replace(one, payload=next(left)) if isinstance(one, EncodedForwardBackward) else one
            for one in self.operations
        ]
        return TrainBatch(operations=operations)


class OptimStep(Message):
    """Apply the accumulated gradient and clear it. ``params`` are the optimiser's own fields."""

    request_id: str
    model_id: str
    params: dict[str, StepField] = {}


class SaveState(Message):
    """Write a run into an absent ``directory``: a PEFT adapter, and the training state unless ``weights_only``.

    A full run becomes a Hugging Face directory, or with ``is_snapshot`` only what `LoadState` of such a run needs.
    """

    request_id: str
    model_id: str
    directory: str
    weights_only: bool = False
    is_snapshot: bool = False
    shares_with: str = ""
    """An older snapshot: what it has unchanged is linked, where that can be, and not written again."""


class LoadState(Message):
    """Replace a run's weights from ``directory``; with ``optimizer`` also moments, step counter and gradient."""

    request_id: str
    model_id: str
    directory: str
    optimizer: bool = False


class DropRun(Message):
    request_id: str
    model_id: str


class RegisterLoss(Message):
    """Check an uploaded loss graph and keep it under ``loss_id`` for ``loss_fn='custom'``."""

    request_id: str
    loss_id: str
    inputs: list[tuple[str, int]]
    """Names and ranks (0, 1 or 2) of the graph's parameters; ``logprobs`` comes first."""
    graph: dict[str, Any]


class PublishSampler(Message):
    """Freeze a run's present weights, in memory, as the sampler ``sampler_id``."""

    request_id: str
    model_id: str
    sampler_id: str


class LoadSampler(Message):
    """Make the sampler ``sampler_id`` from a saved adapter directory."""

    request_id: str
    sampler_id: str
    directory: str


class DropSampler(Message):
    """Forget a sampler; sequences under way with it finish."""

    request_id: str
    sampler_id: str


class SampleRequest(Message):
    request_id: str
    prompt: np.ndarray
    images: list[ImageInput] = []
    """Beside ``prompt``, which holds the text; all that is said of positions counts their tokens too."""
    sampler_id: str | None = None
    """``None`` samples the base model."""
    num_samples: int = 1
    params: SamplingParams = SamplingParams()
    prompt_logprobs: bool = False
    prompt_logprobs_last_n: int | None = None
    topk_prompt_logprobs: int = 0
    topk_sample_logprobs: int = 0
    target_prompt_logprobs: np.ndarray | None = None
    """``int[len(prompt) - 1, K]`` ids to score; row i belongs to prompt position i + 1, and -1 is skipped."""
    prompt_alt_tokens_k: int = 0
    cache_salt: str = ""
    """Prompts share cached prefixes only under equal salts, so that users cannot time one another."""
    grammar: str = ""
    """What the samples are confined to, in llguidance's dialect of Lark; empty leaves them free."""
    stream: bool = False


class Cancel(Message):
    """Stop a sample; it answers ``Failed`` with category ``cancelled``."""

    request_id: str


class GetStatus(Message):
    request_id: str


class Shutdown(Message):
    """Finish the step under way and leave."""


# ── replies ───────────────────────────────────────────────────────────────────────────────────────────


class ModelInfo(Message):
    """What an engine says of itself once it is ready."""

    model_name: str
    directory: str
    architecture: str
    vocab_size: int
    max_context: int
    num_parameters: int
    dtype: str
    device: str
    token_budget: int
    """Most tokens of one packed training pass."""
    eos_token_ids: list[int]
    target_modules: list[str]
    no_images: str = ""
    """Why the model reads no images; empty if it does."""
    kernels: list[str] = []
    """Which kernels compute it on its device, and why others do not, in one line each."""
    quantize: str = "none"
    """The format in which the projections of the base are kept."""


class Ready(Message):
    info: ModelInfo


class LoadProgress(Message):
    """What the engine is doing before it is ready; ``fraction`` is ``None`` where it is not known."""

    stage: str
    fraction: float | None = None


class TrainResult(Message):
    """``logprobs[i]`` has the shape of the targets of datum i."""

    logprobs: list[np.ndarray]
    metrics: dict[str, float]


class StepResult(Message):
    metrics: dict[str, float]


class StateResult(Message):
    """Answers save, load, create and drop; sizes are of what was written, seconds what saving or loading it took."""

    size_bytes: int = 0
    step: int = 0
    seconds: float = 0.0


class TopkLogprobs(Message):
    """``(length, k)`` arrays; padding cells hold token 0 and logprob -99999."""

    token_ids: np.ndarray
    logprobs: np.ndarray


class SampledSequence(Message):
    tokens: np.ndarray
    logprobs: np.ndarray
    stop_reason: Literal["stop", "length"]
    topk_logprobs: TopkLogprobs | None = None


class SampleResult(Message):
    sequences: list[SampledSequence]
    prompt_logprobs: np.ndarray | None = None
    """``float32[len(prompt)]``, NaN where not computed; position 0 always."""
    topk_prompt_logprobs: TopkLogprobs | None = None
    target_prompt_logprobs: np.ndarray | None = None
    prompt_alt_tokens: TopkLogprobs | None = None
    """``(len(prompt) - 1, k)`` draws and their logprobs."""
    prompt_cache_hit_tokens: int = 0
    prompt_tokens: int = 0
    """Length of the prompt, those of its images included."""


class SampleProgress(Message):
    """New tokens of one sequence of a streaming request."""

    request_id: str
    index: int
    tokens: list[int]
    logprobs: list[float]
    topk_logprobs: TopkLogprobs | None = None
    stop_reason: Literal["stop", "length"] | None = None
    """With the last ones."""


class Status(Message):
    num_runs: int
    num_samplers: int
    num_sampling: int
    num_waiting: int
    memory_bytes: int
    train_tokens: int
    sampled_tokens: int
    prefilled_tokens: int
    cached_tokens: int


Result = TrainResult | StepResult | StateResult | SampleResult | Status


# ── between the ranks of one engine ───────────────────────────────────────────────────────────────────


class Verdict(Message):
    """An error of one rank, as the others hear of it."""

    error: str
    is_user: bool
    item: int | None = None
    """The operation of a batch that it belongs to, if it belongs to one."""

    @classmethod
    def of(cls, error: Exception, item: int | None = None) -> "Verdict":
        is_user = isinstance(error, LorimerError)
        return cls(error=str(error) if is_user else f"{type(error).__name__}: {error}", is_user=is_user, item=item)

    def exception(self) -> Exception:
        return InvalidInput(self.error) if self.is_user else RuntimeError(self.error)


class Verdicts(Message):
    """One for each thing that ranks agree on; ``None`` where the rank has seen no error."""

    verdicts: list[Verdict | None]


class OperationPart(Message):
    """What one rank has computed of an operation."""

    logprobs: dict[int, np.ndarray]
    """By the number of the datum."""
    totals: dict[str, float] | None
    num_active: float
    custom: list[dict[str, float]]
    custom_loss: float
    num_positions: int
    num_computed: int


class BatchPart(Message):
    """What one rank has computed of a batch."""

    operations: list[OperationPart]
    expert_counts: np.ndarray | None
    """Tokens per expert of each layer, if it has computed any."""


RankMessage = Verdicts | BatchPart


class Done(Message):
    request_id: str
    result: Result


class Failed(Message):
    """The operation did nothing; all state is as before it."""

    request_id: str
    category: Literal["user", "server", "cancelled"]
    error: str
    code: Literal["", "disk_full"] = ""
    """What the scheduler distinguishes beyond the category."""


Command = (
    CreateRun
    | TrainBatch
    | OptimStep
    | SaveState
    | LoadState
    | DropRun
    | RegisterLoss
    | PublishSampler
    | LoadSampler
    | DropSampler
    | SampleRequest
    | Cancel
    | GetStatus
    | Shutdown
)
Reply = Ready | LoadProgress | Done | Failed | SampleProgress

# ── encoding ──────────────────────────────────────────────────────────────────────────────────────────

_ARRAY = 1
_DTYPES = ("<f4", "<f8", "<i4", "<i8", "|b1", "|u1")


def _encode_array(value: object) -> msgspec.msgpack.Ext:
    if not isinstance(value, np.ndarray):
        raise TypeError(f"cannot send a {type(value).__name__}")
    array = np.ascontiguousarray(value)
    if array.dtype.str not in _DTYPES:
        raise TypeError(f"cannot send an array of {array.dtype}")
    header = bytes([_DTYPES.index(array.dtype.str), value.ndim]) + np.array(value.shape, "<i8").tobytes()
    return msgspec.msgpack.Ext(_ARRAY, header + array.tobytes())


def _decode_extension(code: int, data: memoryview) -> np.ndarray:
    if code != _ARRAY:
        raise ValueError(f"unknown extension {code}")
    dtype, ndim = np.dtype(_DTYPES[data[0]]), data[1]
    shape = np.frombuffer(data, "<i8", ndim, 2)
    return np.frombuffer(data, dtype, -1, 2 + 8 * ndim).reshape(shape)


def _accept_array(kind: type, value: object) -> object:
    if isinstance(value, kind):
        return value
    raise TypeError(f"expected {kind.__name__}, got {type(value).__name__}")


_encoder = msgspec.msgpack.Encoder(enc_hook=_encode_array)
_command_decoder = msgspec.msgpack.Decoder(Command, dec_hook=_accept_array, ext_hook=_decode_extension)
_rank_decoder = msgspec.msgpack.Decoder(RankMessage, dec_hook=_accept_array, ext_hook=_decode_extension)
_reply_decoder = msgspec.msgpack.Decoder(Reply, dec_hook=_accept_array, ext_hook=_decode_extension)


def encode(message: Message) -> bytes:
    return _encoder.encode(message)


def decode_command(data: bytes | bytearray | memoryview) -> Command:
    return _command_decoder.decode(data)


def decode_part(data: bytes | bytearray | memoryview) -> RankMessage:
    """Decode what one rank tells the others."""
    return _rank_decoder.decode(data)


def decode_reply(data: bytes | bytearray | memoryview) -> Reply:
    return _reply_decoder.decode(data)
