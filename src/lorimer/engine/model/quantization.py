"""Frozen weights in 8 or 4 bits: the formats, and products with weights that are in one of them.

A product converts some rows to the dtype of the pass, multiplies with them and forgets them, so that at no time more
than a few megabytes are dense. Forward and backward passes, training and sampling all compute with the same numbers,
code times scale. ``docs/quantization.md`` defines the formats; ``quantized_loading.py`` quantises while it loads.

Legend: R rows (output features; those of all experts, one after the other), I input features, B blocks of a row.
"""

import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lorimer.engine.config import Quantize

BLOCK = 64
"""Inputs that share a scale in the formats of 4 bits; in int8 a whole row does."""
NF4 = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)
"""Quantiles of the normal distribution, from -1 to 1: the code book of QLoRA and bitsandbytes."""
INT4 = tuple(float(level) for level in range(-8, 8))
FORMATS: tuple[Quantize, ...] = ("int8", "int4", "nf4")
_CHUNK = {"cpu": 1 << 20}
"""Weights that a product converts together: on a CPU as many as stay in its cache."""
_DEVICE_CHUNK = 1 << 26
_LOADING_CHUNK = 1 << 22


class QuantizedWeight(nn.Module):
    """A frozen weight ``(O, I)``, or ``(E, O, I)`` of experts, whose rows are quantised each by itself."""

    codes: Tensor
    """int8 ``(R, I)``, or two codes to a byte, the first in the upper half: uint8 ``(R, I / 2)``, I a whole block."""
    scales: Tensor
    """float32 ``(R, 1)``, or ``(R, B)``."""
    pairs: Tensor
    """The two float32 values that each byte stands for, as one int64; unused by int8."""

    def __init__(self, weight: Tensor, kind: Quantize, dtype: torch.dtype, is_transposed: bool = False) -> None:
        """Quantise ``weight`` for passes in ``dtype``; with ``is_transposed`` it is that of experts, ``(E, I, O)``."""
        super().__init__()
        self.kind, self.dtype, self._is_transposed = kind, dtype, is_transposed
        weight = weight.detach().transpose(1, 2) if is_transposed else weight.detach()
        self.shape = weight.shape
        step = max(1, _LOADING_CHUNK // self.shape[-1])
        experts = [weight] if weight.dim() == 2 else list(weight)
        parts = [_quantize(rows_RI.float(), kind) for one in experts for rows_RI in one.split(step)]
        self.register_buffer("codes", torch.cat([codes for codes, _ in parts]))
        self.register_buffer("scales", torch.cat([scales for _, scales in parts]))
        self.register_buffer("pairs", _pairs(kind).to(weight.device))

    @property
    def is_finite(self) -> bool:
        """Whether the weight had only finite numbers; of any other, one scale at least is not finite."""
        return bool(self.scales.isfinite().all())

    @property
    def stored_shape(self) -> torch.Size:
        """The shape of the weight before it was quantised."""
        *experts, rows, columns = self.shape
        return torch.Size([*experts, columns, rows]) if self._is_transposed else self.shape

    @property
    def num_weights(self) -> int:
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        return self.codes.nbytes + self.scales.nbytes

    def __getitem__(self, expert: int) -> Tensor:
        """Return the dense weight ``(O, I)`` of an expert."""
        size = self.shape[-2]
        return self.rows(slice(expert * size, (expert + 1) * size))

    def dense(self) -> Tensor:
        """Return the whole weight, as it was stored, in the dtype of passes."""
        whole = self.rows(slice(0, len(self.codes))).reshape(self.shape)
        return whole.transpose(1, 2) if self._is_transposed else whole

    def multiply(self, x: Tensor) -> Tensor:
        """Return ``x @ weight.T`` for ``x (rows, I)``."""
        parts = [F.linear(x, self._unscaled(rows)) for rows in self._chunks()]
        y = parts[0] if len(parts) == 1 else torch.cat(parts, 1)
        return self._scaled(y)

    def multiply_transposed(self, d_y: Tensor) -> Tensor:
        """Return ``d_y @ weight``."""
        d_y = self._scaled(d_y)
        d_x: Tensor | None = None
        for rows in self._chunks():
            part = self._unscaled(rows)
            d_x = d_y[:, rows] @ part if d_x is None else d_x.addmm_(d_y[:, rows], part)
        assert d_x is not None
        return d_x

    def _scaled(self, y: Tensor) -> Tensor:
        """Return an output, or the gradient of one, times the scales that ``_unscaled`` leaves out."""
        return (y * self.scales.t()).to(y.dtype) if self.kind == "int8" else y

    def _chunks(self) -> Iterator[slice]:
        step = max(1, _CHUNK.get(self.codes.device.type, _DEVICE_CHUNK) // self.shape[-1])
        for start in range(0, len(self.codes), step):
            yield slice(start, min(start + step, len(self.codes)))

    def _unscaled(self, rows: slice) -> Tensor:
        """Return rows without the scales that products apply to their results: integers are exact in any dtype."""
        return self.codes[rows].to(self.dtype) if self.kind == "int8" else self.rows(rows)

    def rows(self, rows: slice | Tensor) -> Tensor:
        """Return dense rows in the dtype of passes."""
        if self.kind == "int8":
            return (self.codes[rows] * self.scales[rows]).to(self.dtype)
        codes, scales_RB = self.codes[rows], self.scales[rows]
        values = self.pairs.index_select(0, codes.reshape(-1).int()).view(torch.float32)
        values.view(*scales_RB.shape, BLOCK).mul_(scales_RB.unsqueeze(-1))
        return values.view(len(codes), -1)[:, : self.shape[-1]].to(self.dtype)


def stored_bytes(kind: Quantize, num_rows: int, num_columns: int) -> int:
    """Return the bytes of a weight in a format."""
    if kind == "int8":
        return num_rows * (num_columns + 4)
    return num_rows * -(-num_columns // BLOCK) * (BLOCK // 2 + 4)


def _quantize(rows_RI: Tensor, kind: Quantize) -> tuple[Tensor, Tensor]:
    """Return codes and scales of float32 rows."""
    if kind == "int8":
        scales = rows_RI.abs().amax(1, keepdim=True) / 127
        return (rows_RI / _divisor(scales)).round().clamp_(-127, 127).to(torch.int8), scales
    blocks = F.pad(rows_RI, (0, -rows_RI.shape[1] % BLOCK)).view(len(rows_RI), -1, BLOCK)
    scales = blocks.abs().amax(-1)
    if kind == "int4":
        # The largest weight becomes -8, whatever its sign: all sixteen levels are used.
        largest = blocks.gather(-1, blocks.abs().argmax(-1, keepdim=True)).squeeze(-1)
        scales = torch.where(scales.isfinite(), largest / -8, scales)
    levels = blocks / _divisor(scales).unsqueeze(-1)
    book = torch.tensor(_code_book(kind), device=rows_RI.device)
    nearest = torch.bucketize(levels, (book[1:] + book[:-1]) / 2, out_int32=True).to(torch.uint8)
    codes = nearest.view(len(rows_RI), -1)
    return (codes[:, ::2] << 4) | codes[:, 1::2], scales


def _divisor(scales: Tensor) -> Tensor:
    """Return the scales, and 1 where all weights are zero."""
    return torch.where(scales == 0, 1.0, scales)


def _code_book(kind: Quantize) -> tuple[float, ...]:
    return NF4 if kind == "nf4" else INT4


def _pairs(kind: Quantize) -> Tensor:
    book, byte = torch.tensor(_code_book(kind)), torch.arange(256)
    return torch.stack([book[byte >> 4], book[byte & 15]], -1).view(torch.int64).view(-1)
