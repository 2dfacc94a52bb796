"""Commands on `lorimer/debug` that tests of the engine, its worker and its process have in common."""

from typing import Any

import numpy as np

from lorimer.engine.config import EngineConfig
from lorimer.engine.messages import ForwardBackward, RegisterLoss, SampleRequest, SamplingParams
from lorimer.models.debug import VOCAB_SIZE
from tests.engine.reference import DEVICE, make_datum


def settings(cache, **more):
    on = "cpu" if DEVICE.type == "cpu" else "auto"
    fields: dict[str, Any] = {"device": on, "dtype": "float32", "num_threads": 1, "memory_bytes": 256 << 20}
    return EngineConfig(**{"model": "lorimer/debug", "cache_directory": str(cache)} | fields | more)


def make_operation(request_id, model_id, loss_fn="cross_entropy", lengths=(9, 17, 5), seed=0, **more):
    data = [make_datum(loss_fn, length, seed + i, VOCAB_SIZE) for i, length in enumerate(lengths)]
    return ForwardBackward(request_id=request_id, model_id=model_id, data=data, loss_fn=loss_fn, **more)


def make_sample(request_id, prompt_length=20, prompt_seed=0, max_tokens=8, seed=1, **more):
    """A request that nothing but ``max_tokens`` ends."""
    prompt = np.random.default_rng(prompt_seed).integers(3, VOCAB_SIZE, prompt_length)
    params = SamplingParams(max_tokens=max_tokens, seed=seed, stop=[])
    return SampleRequest(request_id=request_id, prompt=prompt, params=params, **more)


def register_gather(request_id, loss_id):
    """A loss that picks logprobs by an input, ``-logprobs.gather(0, index).sum()``; a bad index fails when it runs."""
    nodes = [
        {"op": "placeholder", "name": "logprobs", "target": "logprobs"},
        {"op": "placeholder", "name": "index", "target": "index"},
        {
            "op": "call_function",
            "name": "a",
            "target": "torch.gather",
            "args": [{"ref": "logprobs"}, 0, {"ref": "index"}],
        },
        {"op": "call_method", "name": "b", "target": "sum", "args": [{"ref": "a"}]},
        {"op": "call_function", "name": "c", "target": "operator.neg", "args": [{"ref": "b"}]},
        {
            "op": "output",
            "name": "output",
            "target": "output",
            "args": [{"tuple": [{"ref": "c"}, {"dict": {"custom/picked:sum": {"ref": "b"}}}]}],
        },
    ]
    graph = {"format": 1, "nodes": nodes}
    return RegisterLoss(request_id=request_id, loss_id=loss_id, inputs=[("logprobs", 1), ("index", 1)], graph=graph)
