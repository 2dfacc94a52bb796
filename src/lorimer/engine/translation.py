"""Translate types of the wire and the journal (``lorimer.types``) into the engine's own.

Training operations reach the engine process as the bytes that the journal holds, and are decoded here: the API process
never decodes them. Does not import torch.
"""

import numpy as np

from lorimer import types
from lorimer.engine.messages import CsrArray, Datum, EncodedForwardBackward, ForwardBackward, ImageInput
from lorimer.errors import Unsupported
from lorimer.types.compatibility import PROTOBUF
from lorimer.types.encoding import decode_training_request
from lorimer.types.tensors import TensorData


def decode_operation(operation: EncodedForwardBackward) -> ForwardBackward:
    request = decode_training_request(bytes(operation.payload), PROTOBUF)
    return ForwardBackward(
        request_id=operation.request_id,
        model_id=operation.model_id,
        data=[engine_datum(datum, index) for index, datum in enumerate(request.data)],
        loss_fn=request.loss_fn,
        loss_fn_config=request.loss_fn_config,
        forward_only=operation.forward_only,
    )


def engine_datum(datum: types.Datum, index: int) -> Datum:
    dense, sparse = {}, {}
    for name, tensor in datum.loss_fn_inputs.items():
        if tensor.csr is None:
            dense[name] = tensor.values
        else:
            sparse[name] = _csr(tensor)
    tokens, images = engine_input(datum.model_input, f"data[{index}].model_input")
    return Datum(tokens=tokens, loss_fn_inputs=dense, sparse_inputs=sparse, images=images)


def engine_input(model_input: types.ModelInput, field: str) -> tuple[np.ndarray, list[ImageInput]]:
    """Return the tokens of the text, and the images with their positions in it."""
    text: list[types.ModelInputChunk] = []
    images: list[ImageInput] = []
    offset = 0
    for index, chunk in enumerate(model_input.chunks):
        if isinstance(chunk, types.EncodedTextChunk):
            text.append(chunk)
            offset += len(chunk.tokens)
        elif isinstance(chunk, types.ImageChunk):
            images.append(
                ImageInput(
                    data=chunk.data,
                    format=chunk.format,
                    offset=offset,
                    chunk=index,
                    expected_tokens=chunk.expected_tokens,
                )
            )
        else:
            raise Unsupported(f"{field} has a chunk of type {chunk.type!r}; accepted are text and images")
    return types.ModelInput.model_construct(chunks=text).to_array(), images


def _csr(tensor: TensorData) -> CsrArray:
    assert tensor.csr is not None
    crow, columns = tensor.csr
    rows, width = tensor.dense_shape
    return CsrArray(values=tensor.values, crow_indices=crow, col_indices=columns, shape=(rows, width))
