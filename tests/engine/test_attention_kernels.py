"""Kernels of torch for attention against the block implementation, and which of them are chosen.

Flash attention of packed sequences runs on CUDA only. Here a function of the same meaning takes its place, so that what
it is given is compared; its own kernels are compared when an engine starts on a GPU.
"""

from dataclasses import replace

import pytest
import torch

from lorimer.engine.model import attention_kernels
from lorimer.engine.model.attention import Shape, attend_blocks, group_sequences
from lorimer.engine.model.attention_kernels import KERNELS, Kernel, attend_sdpa, attend_varlen, choose
from lorimer.engine.training.trainer import TrainItem
from tests.engine.reference import DEVICE, checked, make_adapter, make_datum, open_pair
from tests.engine.test_training import assert_same_gradients, run

H, K, D = 6, 3, 16
CPU = torch.device("cpu")
VARLEN, SDPA = KERNELS
LENGTHS = [5, 7, 3, 300, 7, 130, 12, 9]
PASTS = [(), (), (), (), (), (), (slice(15, 315),), (slice(15, 315), slice(0, 5))]


def naive_varlen(q, k, v, query_ends, key_ends, max_q, max_k, *, scale, window_size, enable_gqa):
    """What `varlen_attn` is documented to compute, with the causal mask at the lower right."""
    assert enable_gqa and query_ends.dtype == key_ends.dtype == torch.int32
    assert max_q == query_ends.diff().max() and max_k == key_ends.diff().max()
    parts = []
    for i in range(len(query_ends) - 1):
        q_i = q[query_ends[i] : query_ends[i + 1]].transpose(0, 1)
        k_i, v_i = (
            x[key_ends[i] : key_ends[i + 1]].transpose(0, 1).repeat_interleave(q.shape[1] // k.shape[1], 0)
            for x in (k, v)
        )
        num_queries, num_keys = q_i.shape[1], k_i.shape[1]
        distance = torch.arange(num_queries)[:, None] + num_keys - num_queries - torch.arange(num_keys)
        hidden = distance < 0 if window_size[0] < 0 else (distance < 0) | (distance > window_size[0])
        scores = (q_i @ k_i.transpose(1, 2) * scale).masked_fill(hidden, float("-inf"))
        parts.append((scores.softmax(-1) @ v_i).transpose(0, 1))
    return torch.cat(parts)


@pytest.fixture
def flash(monkeypatch):
    monkeypatch.setattr(attention_kernels, "varlen_attn", naive_varlen)


def compare(attend, shape, pasts):
    generator = torch.Generator().manual_seed(0)
    starts = [sum(LENGTHS[:i]) for i in range(len(LENGTHS))]
    groups = group_sequences(LENGTHS, starts, pasts=pasts)
    q, k, v = (
        torch.randn(sum(LENGTHS), heads, D, generator=generator).transpose(0, 1).requires_grad_() for heads in (H, K, K)
    )
    d_out = torch.randn(sum(LENGTHS), H, D, generator=generator)
    ours, theirs = (run(q, k, v, groups, shape) for run in (attend, attend_blocks))
    assert (ours - theirs).abs().max() < 1e-5
    for a, b in zip(*(torch.autograd.grad(out, (q, k, v), d_out) for out in (ours, theirs)), strict=True):
        assert (a - b).abs().max() < 1e-5


@pytest.mark.parametrize("shape", [Shape(0.25), Shape(0.3, window=1000)], ids=["plain", "wide-window"])
def test_sdpa_equals_the_blocks(shape):
    compare(attend_sdpa, shape, None)


@pytest.mark.parametrize("shape", [Shape(0.25), Shape(0.25, window=4), Shape(0.3, window=150)], ids=str)
@pytest.mark.parametrize("pasts", [None, PASTS], ids=["alone", "continued"])
@pytest.mark.usefixtures("flash")
def test_varlen_gets_every_sequence_with_what_it_continues(shape, pasts):
    compare(attend_varlen, shape, pasts)


def test_a_kernel_is_asked_only_for_what_it_computes():
    starts = [sum(LENGTHS[:i]) for i in range(len(LENGTHS))]
    alone, continued = group_sequences(LENGTHS, starts), group_sequences(LENGTHS, starts, pasts=PASTS)
    assert SDPA.accepts_groups(Shape(1.0), alone)
    assert not SDPA.accepts_groups(Shape(1.0), continued)
    assert not SDPA.accepts_groups(Shape(1.0, window=299), alone)
    assert VARLEN.accepts_groups(Shape(1.0, window=4), continued)
    cuda = torch.device("cuda")
    for kernel in KERNELS:
        assert kernel.refuses(Shape(1.0), 128, torch.bfloat16, cuda) == ""
        assert kernel.refuses(Shape(1.0), 128, torch.bfloat16, CPU) == "not taken on 'cpu'"
        assert "soft caps" in kernel.refuses(Shape(1.0, softcap=2.0), 128, torch.bfloat16, cuda)
        assert "sinks" in kernel.refuses(Shape(1.0, sinks=torch.ones(2)), 128, torch.bfloat16, cuda)
    assert VARLEN.refuses(Shape(1.0), 128, torch.float32, cuda) == "computes bfloat16 and float16, not float32"
    assert VARLEN.refuses(Shape(1.0), 512, torch.bfloat16, cuda) == "computes heads of up to 256, not 512"
    choice = choose(Shape(1.0), (H, K, D), torch.float32, CPU)
    assert choice.kernel is None
    assert str(choice) == "blocks (varlen: not taken on 'cpu'; sdpa: not taken on 'cpu')"


def always(name, attend):
    return Kernel(name, attend, lambda *_: "", lambda *_: True)


def test_the_choice_is_by_equality_and_then_by_time_and_says_why(monkeypatch):
    def broken(*_):
        raise RuntimeError("no kernel image\nCUDA kernel errors might be reported later")

    def inexact(*args):
        return attend_blocks(*args) * 1.01

    def ignores_the_past(q, k, v, groups, shape):
        return attend_blocks(q, k, v, group_sequences(groups.lengths, groups.starts), shape)

    same, faster = (lambda *args: attend_blocks(*args)), (lambda *args: attend_blocks(*args))
    seconds = {broken: 0.1, inexact: 0.1, ignores_the_past: 0.1, same: 0.7, faster: 0.6, attend_blocks: 1.0}
    monkeypatch.setattr(attention_kernels._Probe, "seconds", lambda self, attend: seconds[attend])
    kernels = [always(str(i), attend) for i, attend in enumerate((broken, inexact, ignores_the_past, same, faster))]
    arguments = Shape(0.25), (H, K, D), torch.float32, CPU
    choice = choose(*arguments, kernels=kernels)
    assert choice.kernel is kernels[4]
    assert choice.reasons.pop("2").startswith("differs from blocks by ")
    assert choice.reasons == {
        "0": "RuntimeError: no kernel image",
        "1": "differs from blocks by 1.0e-02 of the largest value",
        "3": "1.4 times as fast as blocks, must be 1.5",
        "4": "1.7 times as fast as blocks",
    }
    assert choose(*arguments, kernels=kernels[:4]).kernel is None, "not enough faster"
    no_groups = replace(always("no groups", faster), accepts_groups=lambda *_: False)
    assert str(choose(*arguments, kernels=[no_groups])) == "blocks (no groups: computes none of the probes)"


def test_an_engine_says_what_it_has_chosen():
    model, _ = open_pair("gemma2")
    *attention, pairs, products, rows, decoding = model.kernels
    refused = f"blocks (varlen: not taken on '{DEVICE.type}'; sdpa: not taken on '{DEVICE.type}')"
    assert len(attention) == 2 and all(line.endswith(f"a soft cap: {refused}") for line in attention), attention
    assert sum("a window of" in line for line in attention) == 1
    assert pairs == f"products of several adapters: one by one (grouped ones are not taken on '{DEVICE.type}')"
    assert (
        products.startswith("products: ")
        and rows.startswith("norms, gates, softmax and drawing: ")
        and decoding == model.describe_decoding()
    )


def test_time_is_measured():
    probe = attention_kernels._Probe(Shape(0.25), (H, K, D), torch.float32, CPU, attention_kernels._ALONE)
    assert 0 < probe.seconds(attend_blocks) < 60


@pytest.mark.parametrize("attend", [attend_sdpa, attend_varlen], ids=["sdpa", "varlen"])
@pytest.mark.usefixtures("flash")
def test_training_with_a_kernel_gives_the_same_gradients(attend):
    model, _ = open_pair("qwen3")
    data = [make_datum("cross_entropy", n, seed, model.vocab_size) for seed, n in enumerate((9, 17, 5, 140))]
    data.append(replace_tokens(data[3], 100))
    gradients = []
    for kernel in (None, replace(SDPA, attend=attend) if attend is attend_sdpa else always("varlen", attend)):
        for module in model.decoder.modules():
            if hasattr(module, "lorimer_heads"):
                module.lorimer_kernel = kernel
        for recomputed in (512, 16):
            adapter = make_adapter(model)
            run(model, [TrainItem(checked(data, "cross_entropy", model.vocab_size), adapter)], recomputed)
            gradients.append(adapter.grads)
    for found in gradients[1:]:
        assert_same_gradients(found, gradients[0], 1e-4)


def replace_tokens(datum, start):
    """A datum that shares its beginning with another."""
    tokens = datum.tokens.copy()
    tokens[start:] = (tokens[start:] + 1) % 200
    return type(datum)(tokens=tokens, loss_fn_inputs=datum.loss_fn_inputs)
