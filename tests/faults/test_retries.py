"""A request that is sent again after a restart is the same request: what tells so does not depend on the process."""

import json
import random
import string

from lorimer.types.encoding import decode_training_request, encode_training_request


def test_the_same_request_has_the_same_bytes_in_every_process():
    """Maps are written in the order of their keys. Left alone, protobuf's order differs from process to process."""
    names = list(string.ascii_lowercase)
    tensor = {"data": [1.0, 2.0], "dtype": "float32", "shape": [2]}
    written = []
    for seed in range(2):
        shuffled = random.Random(seed).sample(names, len(names))
        datum = {
            "model_input": {"chunks": [{"type": "encoded_text", "tokens": [1, 2]}]},
            "loss_fn_inputs": {f"input-{name}": tensor for name in shuffled},
        }
        body = {
            "model_id": "m",
            "seq_id": 7,
            "forward_backward_input": {
                "data": [datum],
                "loss_fn": "cross_entropy",
                "loss_fn_config": {f"config-{name}": 1.0 for name in shuffled},
            },
        }
        written.append(encode_training_request(decode_training_request(json.dumps(body).encode(), "application/json")))
    for kind in ("input", "config"):
        places = [written[0].index(f"{kind}-{name}".encode()) for name in names]
        assert places == sorted(places)
    assert written[0] == written[1]
