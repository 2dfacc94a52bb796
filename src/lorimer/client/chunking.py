"""Splits the data of one call into requests that a server takes, and merges their results into one."""

from collections.abc import Iterator, Sequence

from lorimer.types import (
    Datum,
    DmelChunk,
    EncodedTextChunk,
    ForwardBackwardOutput,
    ImageAssetPointerChunk,
    ImageChunk,
    ModelInputChunk,
    TensorData,
)
from lorimer.types.metrics import reduce_metric

TOKEN_BYTES = 4


def estimate_bytes(datum: Datum) -> int:
    """The size of a datum on the wire, nearly."""
    inputs = sum(_chunk_bytes(chunk) for chunk in datum.model_input.chunks)
    return inputs + sum(_tensor_bytes(tensor) for tensor in datum.loss_fn_inputs.values())


def _chunk_bytes(chunk: ModelInputChunk) -> int:
    match chunk:
        case EncodedTextChunk():
            return TOKEN_BYTES * len(chunk.tokens)
        case ImageChunk():
            return len(chunk.data)
        case ImageAssetPointerChunk():
            return len(chunk.location)
        case DmelChunk():
            return len(chunk.dmel)
    raise TypeError(f"{type(chunk).__name__} is no chunk of a model input")


def _tensor_bytes(tensor: TensorData) -> int:
    return tensor.values.nbytes + sum(indices.nbytes for indices in tensor.csr or ())


def split(data: Sequence[Datum], most_datums: int, most_bytes: int) -> Iterator[tuple[list[Datum], int]]:
    """Runs of datums in order, each with its size; one that is too large by itself goes alone."""
    chunk: list[Datum] = []
    size = 0
    for datum in data:
        added = estimate_bytes(datum)
        if chunk and (size + added > most_bytes or len(chunk) == most_datums):
            yield chunk, size
            chunk, size = [], 0
        chunk.append(datum)
        size += added
    if chunk:
        yield chunk, size


def merge(results: Sequence[ForwardBackwardOutput]) -> ForwardBackwardOutput:
    """One result of the results of all chunks, in their order."""
    return ForwardBackwardOutput(
        loss_fn_output_type=results[0].loss_fn_output_type,
        loss_fn_outputs=[output for result in results for output in result.loss_fn_outputs],
        metrics=merge_metrics(results),
    )


def merge_metrics(results: Sequence[ForwardBackwardOutput]) -> dict[str, float]:
    """Each metric of the first result that all have, reduced as the part of its name after the colon says."""
    weights = [len(result.loss_fn_outputs) for result in results]
    merged: dict[str, float] = {}
    for key in results[0].metrics:
        if key.count(":") != 1:
            raise ValueError(f"the metric {key!r} does not say after one colon how it is reduced")
        if not all(key in result.metrics for result in results):
            continue
        values = [result.metrics[key] for result in results]
        match key.partition(":")[2]:
            case "sum" | "min" | "max" | "mean" | "slack":
                merged[key] = reduce_metric(key, values, weights)
            case "hash2":
                merged[key] = sum(int(value) for value in values) % 2**64
            case "unique":
                merged[key] = values[0]
                merged |= {f"{key}_{index}": value for index, value in enumerate(values[1:], 1)}
    return merged
