"""Compiled functions of decoding against torch, and how they are compiled, kept and done without."""

import itertools
import shutil
import stat

import pytest
import torch
import torch.nn.functional as F

from lorimer.engine.adapters.adapters import snapshot
from lorimer.engine.adapters.lora import LoraTarget
from lorimer.engine.model.attention import Shape
from lorimer.engine.model.linear import CompiledSlices, add_products
from lorimer.engine.model.norms import FrozenRMSNorm
from lorimer.engine.native import library
from lorimer.engine.native.decode import HEAD_DIMS, Decoding, LayerAttention, LowRank
from lorimer.engine.sampling.kv_cache import DecodeAttention, Past, PromptCache, Slab
from lorimer.engine.training.batch import AdapterSlice
from tests.engine.reference import DEVICE, make_adapter, open_pair

DTYPES = [torch.float32, torch.bfloat16]
CPU = torch.device("cpu")

pytestmark = [
    pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler"),
    pytest.mark.skipif(DEVICE.type != "cpu", reason="compiled functions are for CPUs"),
]


def functions(dtype):
    found = library.load(dtype)
    assert not isinstance(found, str), found
    return Decoding(found)


def close(dtype):
    """Both round where the model does; sums in another order may round one bit further."""
    return {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 2**-7, "atol": 1e-3}


def random(generator, *shape, dtype=torch.float32, scale=1.0):
    return (scale * torch.randn(*shape, generator=generator)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_wide", [False, True])
def test_norms_and_sums(dtype, is_wide):
    generator = torch.Generator().manual_seed(0)
    for num_rows, size, scale in itertools.product((1, 7), (16, 96, 576), (1e-3, 1.0, 300.0)):
        x, added = (random(generator, num_rows, size, dtype=dtype, scale=scale) for _ in range(2))
        norm = FrozenRMSNorm(random(generator, size, dtype=torch.float32 if is_wide else dtype), 1e-6)
        assert torch.allclose(functions(dtype).normalise(norm.weight, norm.eps, x), norm(x), **close(dtype))
        total = x + added
        found = functions(dtype).normalise(norm.weight, norm.eps, x, added)
        assert torch.equal(x, total)
        assert torch.allclose(found, norm(total), **close(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_that_is_not_finite_stays_so_and_alone(dtype):
    x = torch.ones(3, 32, dtype=dtype)
    x[1, 5] = float("nan")
    found = functions(dtype).normalise(torch.ones(32, dtype=dtype), 1e-6, x)
    assert found.isnan().any(1).tolist() == [False, True, False]


@pytest.mark.parametrize("dtype", DTYPES)
def test_gates(dtype):
    generator = torch.Generator().manual_seed(0)
    for num_rows, size, scale in itertools.product((1, 5), (16, 1408), (0.1, 3.0, 60.0)):
        both = random(generator, num_rows, 2 * size, dtype=dtype, scale=scale)
        expected = F.silu(both[:, :size]).mul_(both[:, size:])
        assert torch.allclose(functions(dtype).gate(both), expected, **close(dtype))


# ── attention ─────────────────────────────────────────────────────────────────────────────────────────


def make_slab(generator, lengths, pasts, num_kv, size, dtype):
    """Return a slab with one layer, whose rows have these lengths after the pasts that they continue."""
    slab = Slab(1 << 20)
    for length, past in zip(lengths, pasts, strict=True):
        whole = length + (past.length if past else 0)
        pair = [random(generator, num_kv, max(1, whole), size, dtype=dtype) for _ in range(2)]
        slab.add(PromptCache(max(1, whole), whole, [(pair[0], pair[1])]), past)
    return slab


def attend_by_torch(slab, order, layer, qkv, cos, sin):
    attention = DecodeAttention(slab, order, CPU)
    heads = qkv.view(len(qkv), -1, layer.head_dim)
    q, k, v = heads.split([layer.num_heads, layer.num_kv, layer.num_kv], 1)
    if layer.q_norm is not None:
        q, k = layer.q_norm(q), layer.k_norm(k)
    turned = torch.cat([q, k], 1)
    half = layer.head_dim // 2
    swapped = torch.cat([-turned[..., half:], turned[..., :half]], -1)
    turned = turned * cos[:, None] + swapped * sin[:, None]
    q, k = turned[:, : layer.num_heads], turned[:, layer.num_heads :]
    return attention.attend_rows(0, q, k, v, layer.shape).flatten(1)


SHAPES = {
    "plain": Shape(0.125),
    "window": Shape(0.2, window=9),
    "narrow window": Shape(0.2, window=1),
    "softcap": Shape(0.3, softcap=5.0),
    "sinks": Shape(0.125, sinks=torch.linspace(-2, 3, 12)),
    "all": Shape(0.3, window=20, softcap=3.0, sinks=torch.linspace(-2, 3, 12)),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_pasts", [False, True])
@pytest.mark.parametrize("name", SHAPES)
def test_attention(name, has_pasts, dtype):
    check_attention(SHAPES[name], 12, 4, 64, has_pasts, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", HEAD_DIMS)
@pytest.mark.parametrize("num_heads", [1, 2, 5, 8, 14])
def test_sizes_of_heads_and_groups(num_heads, size, dtype):
    for num_kv in {1, num_heads // 2 if num_heads % 2 == 0 else num_heads}:
        check_attention(Shape(size**-0.5), num_heads, num_kv, size, True, dtype, has_norms=True)


def check_attention(shape, num_heads, num_kv, size, has_pasts, dtype, has_norms=False):
    generator = torch.Generator().manual_seed(0)
    lengths = [0, 3, 40, 17, 100, 31]
    pasts: list[Past | None] = [None] * 6
    if has_pasts:
        prompts = [
            PromptCache(n + 5, n, [tuple(random(generator, num_kv, n + 5, size, dtype=dtype) for _ in range(2))])
            for n in (1, 50)
        ]
        known = [Past(prompts[0], 1), Past(prompts[1], 50), Past(prompts[1], 33)]
        pasts = [known[0], known[1], None, known[1], known[2], known[0]]
    norms = [FrozenRMSNorm(random(generator, size, dtype=dtype), 1e-6) for _ in range(2)] if has_norms else [None, None]
    layer = LayerAttention(num_heads, num_kv, size, shape, *norms)
    assert layer.is_possible
    order = [4, 0, 5, 2, 1, 3]
    qkv = random(generator, 6, (num_heads + 2 * num_kv) * size, dtype=dtype)
    angles = 10 * torch.rand(6, size // 2, generator=generator).repeat(1, 2)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    generator.manual_seed(1)
    theirs = make_slab(generator, lengths, pasts, num_kv, size, dtype)
    expected = attend_by_torch(theirs, order, layer, qkv.clone(), cos, sin)
    generator.manual_seed(1)
    ours = make_slab(generator, lengths, pasts, num_kv, size, dtype)
    found = DecodeAttention(ours, order, CPU).attend_native(functions(dtype), 0, layer, qkv, cos, sin)
    assert torch.allclose(
        found.float(), expected.float(), **close(dtype) | {"atol": 1e-5 if dtype == torch.float32 else 8e-3}
    )
    for mine, other in zip(ours.layer(0), theirs.layer(0), strict=True):
        assert torch.allclose(mine.float(), other.float(), **close(dtype))


def test_threads_change_nothing():
    generator, lengths = torch.Generator().manual_seed(0), [200 + i for i in range(48)]
    slab = make_slab(generator, lengths, [None] * 48, 4, 64, torch.float32)
    qkv = random(generator, 48, 16 * 64)
    cos, sin = torch.ones(48, 64), torch.zeros(48, 64)
    layer, found, before = LayerAttention(8, 4, 64, Shape(0.125)), [], torch.get_num_threads()
    for num_threads in (1, 8):
        torch.set_num_threads(num_threads)
        try:
            attention = DecodeAttention(slab, range(48), CPU)
            found.append(attention.attend_native(functions(torch.float32), 0, layer, qkv.clone(), cos, sin))
        finally:
            torch.set_num_threads(before)
    assert torch.equal(*found)


def test_heads_that_are_rotated_in_part_are_left_to_torch():
    layer = LayerAttention(2, 1, 64, Shape(0.125))
    slab = make_slab(torch.Generator().manual_seed(0), [3], [None], 1, 64, torch.float32)
    with pytest.raises(ValueError, match=r"\(1, 32\), is not laid out"):
        DecodeAttention(slab, [0], CPU).attend_native(
            functions(torch.float32), 0, layer, torch.zeros(1, 256), torch.ones(1, 32), torch.ones(1, 32)
        )


# ── low-rank pairs ────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [[1], [2, 1, 4, 9], [33, 5]])
def test_low_rank_pairs(rows, dtype):
    """Adapters of several ranks, of which one has no pair for a target, with rows of the base between them."""
    generator = torch.Generator().manual_seed(0)
    targets = [LoraTarget(name, name, "attn", 96, out, offset) for name, out, offset in (("q", 80, 0), ("k", 272, 80))]
    slices, start = [], 2
    for number, count in enumerate(rows):
        rank, weights = (1, 8, 32, 5)[number], {}
        for target in targets[number == 1 :]:
            a, b = random(generator, rank, 96, dtype=dtype), random(generator, target.out_features, rank, dtype=dtype)
            weights[target.name] = (a, b.mT.contiguous().mT)
        slices.append(AdapterSlice(start, start + count, weights, 0.1 + number))
        start += count + 1
    x = random(generator, start + 1, 96, dtype=dtype)
    y = random(generator, start + 1, 352, dtype=dtype)
    expected, compiled = y.clone(), CompiledSlices(slices, functions(dtype))
    add_products(x, expected, targets, slices)
    before = y.clone()
    assert add_products(x, y, targets, compiled) == []
    tolerance = {"rtol": 1e-4, "atol": 1e-4} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 0.2}
    assert torch.allclose(y.float(), expected.float(), **tolerance)
    assert not torch.equal(y, before)
    assert torch.equal(y[:2], before[:2])


def test_tensors_that_would_be_misread_are_refused():
    weight, x = torch.ones(32), torch.ones(4, 64)
    for wrong in (x, x[:, ::2], x[:, :32].bfloat16()):
        with pytest.raises(ValueError, match="is not laid out for compiled functions"):
            functions(torch.float32).normalise(weight, 1e-6, wrong)
    target, pair = LoraTarget("q", "q", "attn", 32, 32), (torch.ones(4, 32), torch.ones(4, 32).t())
    slices, y = CompiledSlices([AdapterSlice(0, 4, {"q": pair}, 1.0)], functions(torch.float32)), torch.zeros(4, 32)
    assert len(add_products(x[:, ::2], y, [target], slices)) == 1, "torch multiplied"
    assert torch.equal(y, torch.full((4, 32), 128.0))


def test_pairs_that_are_laid_out_otherwise_are_left_to_torch():
    target = LoraTarget("q", "q", "attn", 32, 32)
    a, b = torch.ones(4, 32), torch.ones(32, 4)
    x, y, expected = torch.ones(3, 32), torch.zeros(3, 32), torch.full((3, 32), 128.0)
    slices = CompiledSlices([AdapterSlice(0, 3, {"q": (a, b)}, 1.0)], functions(torch.float32))
    assert len(add_products(x, y, [target], slices)) == 1
    assert torch.equal(y, expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_frozen_adapters_are_laid_out_for_them(dtype):
    model, _ = open_pair("llama")
    adapter = make_adapter(model)
    frozen = snapshot(adapter, dtype)
    for name, (a, b) in frozen.weights.items():
        assert LowRank(a, b, 0, 1, 0, 1.0).is_possible or {a.shape[1] % 16, b.shape[0] % 16} != {0}
        assert torch.equal(a, adapter.weights[name][0].to(dtype))
        assert torch.equal(b, adapter.weights[name][1].to(dtype))


# ── compilation ───────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    library.load.cache_clear()
    yield tmp_path / "cache" / "lorimer" / "kernels"
    library.load.cache_clear()


def script(path, text):
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def test_a_library_is_compiled_once(cache, tmp_path, monkeypatch):
    log = tmp_path / "calls"
    monkeypatch.setenv("CC", script(tmp_path / "cc", f'echo "$@" >> {log}; exec {shutil.which("cc")} "$@"'))
    functions(torch.float32)
    (kept,) = cache.iterdir()
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700
    num_calls = len(log.read_text().splitlines())
    library.load.cache_clear()
    functions(torch.float32)
    assert log.read_text().splitlines()[num_calls:] == ["--version"]
    functions(torch.bfloat16)
    assert len(list(cache.iterdir())) == 2
    assert kept.exists()


@pytest.mark.parametrize("which", ["directory", "library"])
def test_what_others_could_have_written_is_not_run(cache, which):
    functions(torch.float32)
    (kept,) = cache.iterdir()
    before = kept.stat().st_mtime_ns
    (cache if which == "directory" else kept).chmod(0o777)
    library.load.cache_clear()
    functions(torch.float32)
    if which == "directory":
        assert kept.stat().st_mtime_ns == before, "it was compiled elsewhere"
    else:
        assert kept.stat().st_mtime_ns > before
        assert not kept.stat().st_mode & stat.S_IWOTH


def test_without_a_home_it_is_compiled_each_time_and_leaves_nothing(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    library.load.cache_clear()
    x = torch.ones(1, 16)
    assert torch.equal(functions(torch.float32).normalise(torch.ones(16), 0.0, x), x)
    library.load.cache_clear()
    assert list(temporary.iterdir()) == []


@pytest.mark.parametrize("part", [0.0, 0.6, 0.99])
def test_a_library_that_was_cut_off_is_compiled_again(part, cache, tmp_path, monkeypatch):
    functions(torch.float32)
    (kept,) = cache.iterdir()
    other = tmp_path / "other" / "lorimer" / "kernels" / kept.name  # one that is loaded is not opened again
    other.parent.mkdir(0o700, parents=True)
    content = kept.read_bytes()
    other.write_bytes(content[: int(part * len(content))])
    other.chmod(0o700)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other"))
    library.load.cache_clear()
    functions(torch.float32)
    assert other.stat().st_size == kept.stat().st_size


@pytest.mark.parametrize("what", ["gate", "add_pairs"])
def test_functions_that_compute_something_else_are_not_used(what, monkeypatch):
    own = getattr(Decoding, what)

    def wrong(self, *args):
        found = own(self, *args)
        (args[1] if found is None else found).mul_(1.1)
        return found

    monkeypatch.setattr(Decoding, what, wrong)
    model, _ = open_pair("llama", intermediate_size=96)
    assert model.native is None
    assert all(step.is_used and step.is_native == (what == "add_pairs") for step in model.steps)
    assert model.describe_decoding() == "decoding: torch (compiled functions give other results)"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("number", [float("nan"), float("inf")])
@pytest.mark.parametrize("softcap", [None, 5.0])
def test_scores_that_are_not_finite_are_not_hidden(softcap, number, dtype):
    slab = make_slab(torch.Generator().manual_seed(0), [20, 20], [None] * 2, 1, 64, dtype)
    layer, qkv = LayerAttention(1, 1, 64, Shape(0.125, softcap=softcap)), torch.ones(2, 192, dtype=dtype)
    qkv[1, 3] = number
    found = DecodeAttention(slab, range(2), CPU).attend_native(
        functions(dtype), 0, layer, qkv, torch.ones(2, 64, dtype=dtype), torch.zeros(2, 64, dtype=dtype)
    )
    assert found.isfinite().all(1).tolist() == [True, False]


@pytest.mark.usefixtures("cache")
def test_without_a_compiler_torch_decodes(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    assert library.load(torch.float32) == "there is no C compiler (CC, cc, gcc or clang)"
    model, _ = open_pair("llama")
    assert model.native is None
    assert all(step.is_used and not step.is_native for step in model.steps)
    assert model.kernels[-1] == "decoding: torch (there is no C compiler (CC, cc, gcc or clang))"


@pytest.mark.usefixtures("cache")
def test_a_compiler_that_fails_is_named_with_what_it_said(tmp_path, monkeypatch):
    text = '[ "$1" = --version ] && { echo broken 1.0; exit; }; echo "no space left" >&2; exit 3'
    monkeypatch.setenv("CC", script(tmp_path / "broken", text))
    found = library.load(torch.float32)
    assert found == f"{tmp_path / 'broken'} cannot compile them: no space left"
    (kernels,) = (tmp_path / "cache" / "lorimer").iterdir()
    assert list(kernels.iterdir()) == []
