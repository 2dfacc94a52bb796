"""Bodies for the decoders, and what is asked of them."""

import numpy as np

from lorimer import types
from lorimer.server.decoder import Job
from lorimer.server.decoding import DecodeTraining
from lorimer.types.encoding import encode_training_request

PROTOBUF = "application/x-protobuf"
TRAIN = DecodeTraining(PROTOBUF, False)
MIB = 2**20


def training_body(num_datums: int, num_tokens: int = 8, seq_id: int = 2, model_id: str = "s:train:0") -> bytes:
    ids = np.arange(num_tokens + 1, dtype=np.int64) % 200 + 3
    datum = types.Datum(
        types.ModelInput.from_ints(ids[:-1]),
        {"target_tokens": ids[1:], "weights": np.ones(num_tokens, np.float32)},
    )
    return encode_training_request(types.TrainingRequest(model_id, seq_id, [datum] * num_datums, "cross_entropy"))


def job(task, body: bytes, encoding: str = "", max_bytes: int = 256 * MIB) -> Job:
    return Job(task, len(body), encoding, max_bytes)
