"""Shortened decoding of a layer against the layer's own forward, and which layers keep their own."""

import pytest
import torch

from lorimer.engine.model.attention import Shape
from lorimer.engine.model.stepping import LayerStep
from lorimer.engine.sampling.kv_cache import DecodeAttention, PrefillAttention, PrefillSpan, PromptCache, Slab
from lorimer.engine.training.batch import AdapterSlice, Pass
from lorimer.models.debug import ARCHITECTURES
from tests.engine.reference import make_adapter, on_device, open_pair

KEEPS_ITS_OWN = {"gpt_oss"}


@torch.no_grad()
def decode(model, adapter, num_rows):
    """Hidden states of rows after prompts of several lengths, the last third of them with the adapter."""
    slab, generator = Slab(1 << 20), torch.Generator().manual_seed(0)
    lengths = [3 + 5 * (i % 4) for i in range(num_rows)]
    for length in lengths:
        cache = PromptCache(length)
        prefill = PrefillAttention([PrefillSpan(0, length, cache)])
        tokens = torch.randint(model.vocab_size, (length,), generator=generator)
        model.hidden(on_device(tokens), on_device(torch.arange(length)), Pass([], cache=prefill))
        prefill.finish()
        slab.add(cache)
    order = list(reversed(range(num_rows)))
    slices = [AdapterSlice(num_rows - num_rows // 3, num_rows, adapter.weights, adapter.scale)]
    tokens = torch.randint(model.vocab_size, (num_rows,), generator=generator)
    current = Pass(slices, cache=DecodeAttention(slab, order, model.device.handle))
    return model.hidden(on_device(tokens), on_device(torch.tensor(lengths)[order]), current)


@pytest.mark.parametrize("num_rows", [1, 9, 70])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_step_equals_the_layers_own_forward(architecture, num_rows):
    model, _ = open_pair(architecture)
    assert all(step.is_used == (architecture not in KEEPS_ITS_OWN) for step in model.steps)
    adapter = make_adapter(model)
    ours = decode(model, adapter, num_rows)
    for step in model.steps:
        step._parts = None
    theirs = decode(model, adapter, num_rows)
    assert torch.allclose(ours, theirs, atol=2e-5, rtol=1e-4)


def test_a_layer_that_does_something_else_keeps_its_forward():
    model, _ = open_pair("llama")
    first, second = model.steps
    own = first._forward
    first._forward = lambda x, **kwargs: own(x, **kwargs) + 0.01 * x * kwargs["position_ids"].unsqueeze(-1) / 256
    model._probe_steps(on_device(torch.arange(11)))
    assert not first.is_used
    assert second.is_used


def test_a_layer_made_of_other_parts_keeps_its_forward():
    model, _ = open_pair("llama")
    step = LayerStep(torch.nn.Linear(2, 2), lambda x: x, model.slot)
    step.probe()
    assert not step.is_used


def test_the_shape_of_attention_is_known_after_loading():
    model, _ = open_pair("mistral", sliding_window=4)
    shapes = [module.lorimer_shape for module in model.decoder.modules() if hasattr(module, "lorimer_shape")]
    assert len(shapes) == 2
    assert all(isinstance(shape, Shape) and shape.window == 4 for shape in shapes)
