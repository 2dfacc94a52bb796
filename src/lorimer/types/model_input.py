"""Model inputs: a sequence of chunks of tokens, images and audio.

Without ``type`` the kind of a chunk is inferred from its keys, as releases up to 0.16 need. Images and audio are
carried undecoded, and no location is ever fetched, but a pointer may embed its image in a data URL.
"""

import base64
import binascii
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Any, Literal, Self, overload

import numpy as np
from numpy.typing import NDArray
from pydantic import (
    BeforeValidator,
    Discriminator,
    Field,
    PlainSerializer,
    Tag,
    ValidationError,
    ValidatorFunctionWrapHandler,
    field_serializer,
    field_validator,
)

from lorimer.errors import InvalidInput, Unsupported
from lorimer.types.base import Counter, Request
from lorimer.types.tensors import is_torch_tensor


class Tokens(Sequence[int]):
    """Token ids backed by an array, so that those of a request are not converted to Python integers one by one."""

    __slots__ = ("array",)

    def __init__(self, array: NDArray[np.integer[Any]]) -> None:
        self.array = array

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[int]: ...
    def __getitem__(self, index: int | slice) -> int | Sequence[int]:
        found: int | list[int] = self.array[index].tolist()
        return found

    def __len__(self) -> int:
        return len(self.array)

    def __iter__(self) -> Iterator[int]:
        return iter(self.array.tolist())

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        return np.array(self.array, dtype=dtype, copy=copy)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Tokens):
            return np.array_equal(self.array, other.array)
        return isinstance(other, list | tuple) and self.array.tolist() == list(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(self.array.tolist())


def _from_base64(value: object) -> object:
    if not isinstance(value, str):
        return value
    try:
        return base64.b64decode(value, validate=True)
    except binascii.Error:
        raise ValueError("not base64") from None


Base64Bytes = Annotated[
    bytes, BeforeValidator(_from_base64), PlainSerializer(lambda value: base64.b64encode(value).decode())
]
"""Bytes in memory, base64 in JSON."""
ImageFormat = Literal["png", "jpeg"]
_TokenId = Annotated[int, Field(strict=True, ge=-(2**31), lt=2**31)]
"""Strict: JSON's ``true``, ``"1"`` and ``1.0`` are not token ids."""


class EncodedTextChunk(Request):
    tokens: Sequence[_TokenId]
    type: Literal["encoded_text"] = "encoded_text"

    @field_validator("tokens", mode="wrap")
    @classmethod
    def _keep_arrays(cls, value: object, validate: ValidatorFunctionWrapHandler) -> object:
        array = value.array if isinstance(value, Tokens) else value
        if is_torch_tensor(array):
            array = array.numpy(force=True)  # type: ignore[attr-defined]
        if isinstance(array, np.ndarray):
            return Tokens(_as_token_ids(array))
        try:
            return validate(value)
        except ValidationError:
            if not isinstance(value, list | tuple) or not any(isinstance(token, np.integer) for token in value):
                raise
        return validate([int(token) if isinstance(token, np.integer) else token for token in value])

    @field_serializer("tokens")
    def _as_list(self, value: Sequence[int]) -> list[int]:
        return list(value)

    @classmethod
    def from_array(cls, tokens: NDArray[np.int32]) -> Self:
        """Create a chunk over the array without a copy. The array must not change afterwards."""
        return cls.model_construct(tokens=Tokens(tokens))

    @property
    def length(self) -> int:
        return len(self.tokens)


def _as_token_ids(array: NDArray[Any]) -> NDArray[np.int32]:
    if array.dtype.kind not in "iu":
        raise ValueError(f"token ids are an array of {array.dtype}; integers are accepted")
    if array.ndim != 1:
        raise ValueError(f"token ids have the shape {list(array.shape)}; one dimension is accepted")
    limits = np.iinfo(np.int32)
    if array.size and not limits.min <= array.min() <= array.max() <= limits.max:
        raise ValueError(f"token ids reach from {array.min()} to {array.max()}; 32 bits are accepted")
    return np.array(array, "<i4")


class ImageChunk(Request):
    """An image in its file format. ``expected_tokens`` is advisory; the server counts for itself."""

    data: Base64Bytes
    format: ImageFormat
    expected_tokens: Counter | None = None
    type: Literal["image"] = "image"

    @property
    def length(self) -> int:
        return _expected_tokens(self)


class ImageAssetPointerChunk(Request):
    """An image by location. The server accepts only data URLs."""

    format: ImageFormat
    location: str
    expected_tokens: Counter | None = None
    type: Literal["image_asset_pointer"] = "image_asset_pointer"

    @property
    def length(self) -> int:
        return _expected_tokens(self)


class DmelChunk(Request):
    """Audio as a tensor in a container whose header gives dtype and shape."""

    dmel: Base64Bytes
    type: Literal["dmel"] = "dmel"

    @property
    def length(self) -> int:
        shape = container_shape(self.dmel)
        if not shape:
            raise ValueError("a dmel tensor without dimensions has no length")
        return shape[0]


_KINDS: dict[type, str] = {
    EncodedTextChunk: "encoded_text",
    ImageChunk: "image",
    ImageAssetPointerChunk: "image_asset_pointer",
    DmelChunk: "dmel",
}
_KEY_OF_KIND = {"tokens": "encoded_text", "location": "image_asset_pointer", "data": "image", "dmel": "dmel"}


def kind_of_chunk(value: object) -> str | None:
    """Return the ``type`` of a chunk or of its JSON, inferred from its keys if missing; ``None`` if that fails."""
    if not isinstance(value, dict):
        return _KINDS.get(type(value))
    kind = value.get("type")
    if kind is not None:
        return kind if isinstance(kind, str) else repr(kind)
    return next((kind for key, kind in _KEY_OF_KIND.items() if key in value), None)


ModelInputChunk = Annotated[
    Annotated[EncodedTextChunk, Tag("encoded_text")]
    | Annotated[ImageAssetPointerChunk, Tag("image_asset_pointer")]
    | Annotated[ImageChunk, Tag("image")]
    | Annotated[DmelChunk, Tag("dmel")],
    Discriminator(
        kind_of_chunk,
        custom_error_type="unknown_chunk",
        custom_error_message="a chunk is an object of type encoded_text, image, image_asset_pointer or dmel",
    ),
]


class ModelInput(Request):
    """The input of a model: a sequence of chunks."""

    chunks: list[ModelInputChunk]

    @classmethod
    def from_ints(cls, tokens: Sequence[int]) -> Self:
        """Create a text input. Arrays and tensors are used as they are, without a Python integer per token."""
        try:
            return cls(chunks=[EncodedTextChunk(tokens=tokens)])
        except ValidationError as error:
            raise ValueError(_explain_tokens(tokens, error)) from None

    def to_ints(self) -> list[int]:
        """Return all tokens. Raise ``ValueError`` if a chunk is not text."""
        return [token for tokens in self._token_sequences() for token in tokens]

    def to_array(self) -> NDArray[np.int64]:
        """Like ``to_ints``, as an array."""
        arrays = [
            tokens.array if isinstance(tokens, Tokens) else np.asarray(tokens, np.int64)
            for tokens in self._token_sequences()
        ]
        return np.concatenate(arrays, dtype=np.int64) if arrays else np.empty(0, np.int64)

    def _token_sequences(self) -> Iterable[Sequence[int]]:
        for chunk in self.chunks:
            if not isinstance(chunk, EncodedTextChunk):
                raise ValueError(f"the input has a chunk of type {chunk.type!r}; only text has tokens")
            yield chunk.tokens

    @property
    def length(self) -> int:
        """The number of context positions. An image needs ``expected_tokens``."""
        return sum(chunk.length for chunk in self.chunks)

    @classmethod
    def empty(cls) -> Self:
        return cls(chunks=[])

    def append(self, chunk: ModelInputChunk) -> Self:
        """Return a new input with the chunk added; this one is unchanged."""
        return type(self)(chunks=[*self.chunks, chunk])

    def append_int(self, token: int) -> Self:
        return self.append(EncodedTextChunk(tokens=[token]))


def _explain_tokens(tokens: object, error: ValidationError) -> str:
    """Explain the error in one sentence, however many tokens are wrong."""
    if isinstance(tokens, str):
        return f"tokens is the text {tokens[:40]!r}; token ids are accepted: tokenizer.encode(text)"
    first = error.errors(include_url=False)[0]
    if len(first["loc"]) > 1:
        return f"tokens[{first['loc'][1]}] is {first['input']!r}; token ids are integers of 32 bits"
    if first["type"] == "value_error":
        return str(first["ctx"]["error"])
    return f"tokens is a {type(tokens).__name__}; a sequence of integers is accepted"


def _expected_tokens(chunk: ImageChunk | ImageAssetPointerChunk) -> int:
    if chunk.expected_tokens is None:
        raise ValueError(f"the length of a chunk of type {chunk.type!r} is known only if expected_tokens is set")
    return chunk.expected_tokens


# ── what a pointer holds ──────────────────────────────────────────────────────────────────────────────

_DATA_URL = re.compile(r"data:image/(png|jpeg|jpg);base64,")
_SHOWN_CHARS = 80
DATA_URLS = "'data:image/png;base64,...' or 'data:image/jpeg;base64,...'"
"""The data URLs that are accepted."""


def embedded_image(pointer: ImageAssetPointerChunk, where: str) -> ImageChunk:
    """Decode the image of a ``data:`` URL. Refuse any other location without opening it."""
    image = image_in_url(pointer.location, where)
    if image is None:
        raise Unsupported(
            f"{where} is of type {pointer.type!r} with location {shortened(pointer.location)!r}, which is not opened:"
            " this server fetches nothing from hosts or disks; accepted are images sent as bytes (type 'image') and"
            f" locations that hold the image, {DATA_URLS}"
        )
    if image.format != pointer.format:
        raise InvalidInput(f"{where} has format {pointer.format!r} and a location of {image.format!r}; one is accepted")
    return image.model_copy(update={"expected_tokens": pointer.expected_tokens})


def image_in_url(url: str, where: str) -> ImageChunk | None:
    """Decode the image of a ``data:`` URL; return none for any other URL. Nothing is fetched."""
    header = _DATA_URL.match(url)
    if header is None:
        return None
    try:
        data = base64.b64decode(url[header.end() :], validate=True)
    except ValueError:  # binascii.Error, or a non-ASCII character
        raise InvalidInput(f"{where} is a data URL whose data are not base64") from None
    return ImageChunk(data=data, format="png" if header[1] == "png" else "jpeg")


def shortened(url: str) -> str:
    """Truncate a URL for messages."""
    return url if len(url) <= _SHOWN_CHARS else url[:_SHOWN_CHARS] + "..."


# ── the container of dmel tensors ─────────────────────────────────────────────────────────────────────

_CONSTANT = 254
_NUM_DTYPES = 8
_MAX_DIMENSIONS = 32


def container_shape(data: bytes) -> tuple[int, ...]:
    """Read the shape from a container's header: a marker if it is constant, the dtype, then sizes as varints."""
    offset = 1 if data[:1] == bytes([_CONSTANT]) else 0
    if offset >= len(data):
        raise ValueError("the dmel container ends before its dtype")
    if data[offset] >= _NUM_DTYPES:
        raise ValueError(f"the dmel container has dtype {data[offset]}; 0 to {_NUM_DTYPES - 1} are known")
    dimensions, offset = _read_varint(data, offset + 1)
    if dimensions > _MAX_DIMENSIONS:
        raise ValueError(f"the dmel container has {dimensions} dimensions; at most {_MAX_DIMENSIONS} are accepted")
    shape = []
    for _ in range(dimensions):
        size, offset = _read_varint(data, offset)
        shape.append(size)
    return tuple(shape)


def _read_varint(data: bytes, offset: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 64, 7):
        if offset >= len(data):
            raise ValueError("the dmel container ends within its header")
        value |= (data[offset] & 0x7F) << shift
        offset += 1
        if data[offset - 1] < 0x80:
            return value, offset
    raise ValueError("the dmel container has a size of more than 64 bits")
