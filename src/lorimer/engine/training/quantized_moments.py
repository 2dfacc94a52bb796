"""AdamW's moments in 8 bits: blocks of 256 numbers, each a code of the dynamic map times the block's scale.

The map (Dettmers et al., "8-bit Optimizers via Block-wise Quantization", 2021) gives small numbers an exponent and
large ones more digits. The update itself is computed in float32, a slice of the weight at a time.
"""

from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 256
MIN_NUMBERS = 4096
"""A smaller weight keeps its moments in float32."""
_SLICE_NUMBERS = BLOCK << 14
_SHIFT = 15
_NUM_PREFIXES = 1 << 32 - _SHIFT
"""Of a float32: its sign, its exponent and 8 bits of its fraction."""
_TINY = torch.finfo(torch.float32).tiny


def create(weight: Tensor) -> dict[str, Tensor]:
    """Return the state of a weight before its first step: codes in its shape, and a scale for each block."""
    num_blocks = -(-weight.numel() // BLOCK)
    state = {}
    for name, is_signed in (("exp_avg", True), ("exp_avg_sq", False)):
        zero = _zero_code(is_signed)
        state[name] = torch.full(weight.shape, zero, dtype=torch.uint8, device=weight.device)
        state[f"{name}_scale"] = torch.zeros(num_blocks, device=weight.device)
    return state


def update(weight: Tensor, grad: Tensor, state: dict[str, Tensor], step: int, fields: Mapping[str, Any]) -> None:
    """Take one step of AdamW in place."""
    lr, beta1, beta2 = (fields[name] for name in ("learning_rate", "beta1", "beta2"))
    first, second = 1 - beta1 ** (step + 1), 1 - beta2 ** (step + 1)
    flat = {name: state[name].view(-1) for name in ("exp_avg", "exp_avg_sq")}
    w, g = weight.view(-1), grad.reshape(-1)
    for start in range(0, len(w), _SLICE_NUMBERS):
        part = slice(start, start + _SLICE_NUMBERS)
        blocks = slice(start // BLOCK, (start + _SLICE_NUMBERS) // BLOCK)
        scales = {name: state[f"{name}_scale"][blocks] for name in flat}
        average = _dequantize(flat["exp_avg"][part], scales["exp_avg"], True).lerp_(g[part], 1 - beta1)
        squares = _dequantize(flat["exp_avg_sq"][part], scales["exp_avg_sq"], False).lerp_(g[part].square(), 1 - beta2)
        for name, moment, is_signed in (("exp_avg", average, True), ("exp_avg_sq", squares, False)):
            codes, scale = _quantize(moment, is_signed)
            flat[name][part], scales[name][:] = codes, scale
        denominator = squares.sqrt_().div_(second**0.5).add_(fields["eps"])
        w[part].mul_(1 - lr * fields["weight_decay"]).addcdiv_(average, denominator, value=-lr / first)


def _dequantize(codes: Tensor, scale: Tensor, is_signed: bool) -> Tensor:
    # Faster than to index with a tensor, which is made for more dimensions.
    numbers = _map(is_signed, codes.device).index_select(0, codes.int())
    return _blocks(numbers).mul_(scale[:, None]).view(-1)[: len(codes)]


def _quantize(numbers: Tensor, is_signed: bool) -> tuple[Tensor, Tensor]:
    blocks = _blocks(numbers)
    scale = blocks.abs().amax(1)
    scaled = blocks.div(scale.clamp_min(_TINY)[:, None]).view(-1)
    firsts, ends = _code_table(is_signed, numbers.device)
    prefixes = scaled.view(torch.int32).bitwise_right_shift(_SHIFT).bitwise_and_(_NUM_PREFIXES - 1)
    codes = firsts.index_select(0, prefixes)
    codes += scaled >= ends.index_select(0, prefixes)
    return codes[: len(numbers)], scale


def _blocks(numbers: Tensor) -> Tensor:
    return F.pad(numbers, (0, -len(numbers) % BLOCK)).view(-1, BLOCK)


@cache
def _map(is_signed: bool, device: torch.device) -> Tensor:
    """Return the 256 numbers that codes mean, in ascending order: 0, 1 and seven decades, each finer than the last."""
    found = [0.0, 1.0]
    for decade in range(7):
        edges = torch.linspace(0.1, 1, 2 ** (decade if is_signed else decade + 1) + 1)
        middles = ((edges[:-1] + edges[1:]) / 2 * 10.0 ** (decade - 6)).tolist()
        found += middles + ([-number for number in middles] if is_signed else [])
    return torch.tensor(sorted(found), device=device)


@cache
def _code_table(is_signed: bool, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return, by the leading bits of a number, the smallest code of such numbers, and from where on it is the next one.

    A number's code is that of the nearest number of the map. Numbers with the same leading bits are so close together
    that they have two codes at most, so a table and a comparison replace the search among 255 borders.
    """
    values = _map(is_signed, torch.device("cpu"))
    middles = values[:-1] + (values[1:] - values[:-1]) * 0.5
    prefixes = torch.arange(_NUM_PREFIXES, dtype=torch.int32) << _SHIFT
    ends = torch.stack([prefixes, prefixes | (1 << _SHIFT) - 1]).view(torch.float32)
    first, last = torch.bucketize(ends, middles, right=True).sort(0).values
    assert (last - first)[ends.isfinite().all(0)].max() <= 1
    borders = torch.cat([middles, torch.tensor([torch.inf])])[first]
    return first.to(torch.uint8).to(device), borders.to(device)


def _zero_code(is_signed: bool) -> int:
    return int((_map(is_signed, torch.device("cpu")) == 0).nonzero().item())
