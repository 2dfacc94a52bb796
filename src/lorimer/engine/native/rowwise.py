"""The functions of ``rowwise.c``: norms, gated activations and softmax, forward and backward, row by row.

Training and decoding call them where they can, else compute the same with torch.

Legend: N rows, H hidden size, I inner size, V vocabulary, P targets of all rows, B batches of scores.
"""

import ctypes
import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from lorimer.engine.native.library import INT, LANES, POINTER, Library, declare, load

_ALONE = 1 << 14
"""Numbers that one thread computes faster than several."""
_TOGETHER = 64
"""Rows of one part of a weight's gradient, as in ``rowwise.c``."""


class _Mask(ctypes.Structure):
    _fields_ = [
        *((name, INT) for name in ("num_rows", "num_keys", "cycle", "first", "window", "num_threads")),
        ("scratch", POINTER),
    ]


@dataclass(frozen=True)
class Mask:
    """The keys that each row of scores sees: rows are successive queries, starting anew after ``cycle`` rows."""

    cycle: int
    first: int
    """The last key that the first query sees."""
    window: int | None = None


Sums = tuple[Tensor, Tensor]
"""Of each row of logits the largest, and the logarithm of the sum of the exponentials of the distances to it."""


class Rowwise:
    """The compiled functions for one dtype."""

    def __init__(self, library: Library) -> None:
        functions = library.functions
        self.accepts, self._address, self.compiler = library.accepts, library.address, library.compiler
        normal = [POINTER, POINTER, ctypes.c_float, INT, INT, INT, POINTER]
        self._normalise = declare(functions.add_and_normalise, POINTER, POINTER, *normal)
        self._normalise_gradient = declare(functions.normalise_gradient, POINTER, POINTER, *normal, POINTER)
        self._gate = declare(functions.gate_with_silu, POINTER, POINTER, INT, INT, INT, INT, POINTER)
        self._gate_gradient = declare(functions.gate_gradient, POINTER, POINTER, POINTER, INT, INT, INT, POINTER)
        self._log_sums = declare(functions.log_sums, POINTER, INT, INT, INT, POINTER, POINTER)
        self._log_softmax_gradient = declare(functions.log_softmax_gradient, POINTER, INT, INT, INT, *6 * [POINTER])
        self._draw = declare(functions.draw, POINTER, INT, INT, INT, *6 * [POINTER])
        self._masked_softmax = declare(functions.masked_softmax, POINTER, POINTER)
        self._masked_softmax_gradient = declare(functions.masked_softmax_gradient, POINTER, POINTER, POINTER)

    def can_normalise(self, x: Tensor, weight: Tensor) -> bool:
        is_known = weight.dtype in (x.dtype, torch.float32) and weight.is_contiguous()
        return is_known and x.shape[-1] == len(weight) and len(weight) % LANES == 0

    def normalise(self, weight: Tensor, eps: float, x: Tensor, added: Tensor | None = None) -> Tensor:
        """Return the norm of ``x``, to which ``added`` is added first, in place."""
        size = len(weight)
        out, num_rows = torch.empty_like(x), x.numel() // size
        self._normalise(
            self._address(x, size),
            None if added is None else self._address(added, size),
            *_either(weight),
            eps,
            num_rows,
            size,
            _num_threads(x),
            out.data_ptr(),
        )
        return out

    def normalise_gradient(
        self, weight: Tensor, eps: float, x: Tensor, d_y: Tensor, is_trained: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Return the gradient of ``x`` and, if it is trained, that of the weight in float32."""
        size = len(weight)
        d_x, num_rows = torch.empty_like(x), x.numel() // size
        d_weights = torch.empty(-(-num_rows // _TOGETHER), size, dtype=torch.float32) if is_trained else None
        self._normalise_gradient(
            self._address(x, size),
            self._address(d_y, size),
            *_either(weight),
            eps,
            num_rows,
            size,
            _num_threads(x),
            d_x.data_ptr(),
            None if d_weights is None else d_weights.data_ptr(),
        )
        return d_x, None if d_weights is None else d_weights.sum(0)

    def gate(self, both_N2I: Tensor) -> Tensor:
        """Return ``silu(gate) * up`` of rows that have the gate first."""
        size = both_N2I.shape[1] // 2
        start = self._address(both_N2I, 2 * size)
        return self._gated(start, start + size * both_N2I.element_size(), 2 * size, both_N2I, size)

    def gate_apart(self, gate_NI: Tensor, up_NI: Tensor) -> Tensor:
        """Return ``silu(gate) * up``."""
        size = gate_NI.shape[1]
        return self._gated(self._address(gate_NI, size), self._address(up_NI, size), size, gate_NI, size)

    def _gated(self, gate: int, up: int, stride: int, like: Tensor, size: int) -> Tensor:
        out = like.new_empty(len(like), size)
        self._gate(gate, up, stride, len(like), size, _num_threads(out), out.data_ptr())
        return out

    def gate_gradient(self, gate_NI: Tensor, up_NI: Tensor, d_product_NI: Tensor, d_up_NI: Tensor) -> None:
        """Write the gradient of ``up``, and that of ``gate`` in place of that of their product."""
        num_rows, size = gate_NI.shape
        gate, up, d_product, d_up = (self._address(x, size) for x in (gate_NI, up_NI, d_product_NI, d_up_NI))
        self._gate_gradient(gate, up, d_product, num_rows, size, _num_threads(gate_NI), d_up)

    def log_sums(self, logits_NV: Tensor) -> Sums:
        num_rows, size = logits_NV.shape
        largest_N, logs_N = (torch.empty(num_rows, dtype=torch.float32) for _ in range(2))
        logits = self._address(logits_NV, size)
        self._log_sums(logits, num_rows, size, _num_threads(logits_NV), largest_N.data_ptr(), logs_N.data_ptr())
        return largest_N, logs_N

    def log_softmax_gradient(
        self, logits_NV: Tensor, sums: Sums, firsts: np.ndarray, ids_P: Tensor, d_logprobs_P: Tensor
    ) -> None:
        """Write the gradient of logits in place of them, given that of the log probabilities of targets.

        ``firsts`` has the number of each row's first target and, at the end, that of the first after all of them.
        """
        num_rows, size = logits_NV.shape
        firsts, ids_P = np.ascontiguousarray(firsts, np.int64), ids_P.to(torch.int64).contiguous()
        d_logprobs_P = d_logprobs_P.to(torch.float32).contiguous()
        finals_P = torch.empty_like(d_logprobs_P)
        addresses = (x.data_ptr() for x in (ids_P, d_logprobs_P, finals_P))
        largest, logs = (x.data_ptr() for x in sums)
        logits, num_threads = self._address(logits_NV, size), _num_threads(logits_NV)
        self._log_softmax_gradient(logits, num_rows, size, num_threads, largest, logs, firsts.ctypes.data, *addresses)

    def draw(self, logits_NV: Tensor, temperatures_N: Tensor, numbers_N: np.ndarray) -> tuple[Tensor, ...]:
        """Draw a token for each row of float32 logits, by a number in [0, 1).

        Return tokens and log probabilities, and of each row the largest logit and the logarithm of the sum of the
        exponentials of the distances to it, divided by the temperature.
        """
        num_rows, size = logits_NV.shape
        logits_NV, numbers_N = logits_NV.contiguous(), np.ascontiguousarray(numbers_N, np.float64)
        tokens_N = torch.empty(num_rows, dtype=torch.int64)
        numbers = torch.empty(3, num_rows, dtype=torch.float32).unbind()
        if logits_NV.dtype != torch.float32 or temperatures_N.dtype != torch.float32 or not num_rows == len(numbers_N):
            raise ValueError(f"cannot draw from {logits_NV.dtype}, {tuple(logits_NV.shape)}")
        self._draw(
            logits_NV.data_ptr(),
            num_rows,
            size,
            _num_threads(logits_NV),
            temperatures_N.data_ptr(),
            numbers_N.ctypes.data,
            *(found.data_ptr() for found in (tokens_N, *numbers)),
        )
        return tokens_N, *numbers

    def masked_softmax(self, scores: Tensor, mask: Mask) -> None:
        """Turn ``scores (B, rows, keys)`` into probabilities, in place."""
        found, _scratch = _mask_of(scores, mask)
        self._masked_softmax(ctypes.byref(found), self._address(scores, scores.shape[-1]))

    def masked_softmax_gradient(self, scores: Tensor, gradients: Tensor, mask: Mask) -> None:
        """Turn scores into probabilities, and the gradients of these into those of the scores, in place."""
        found, _scratch = _mask_of(scores, mask)
        addresses = (self._address(x, scores.shape[-1]) for x in (scores, gradients))
        self._masked_softmax_gradient(ctypes.byref(found), *addresses)


def _either(weight: Tensor) -> tuple[int | None, int | None]:
    return (None, weight.data_ptr()) if weight.dtype == torch.float32 else (weight.data_ptr(), None)


def _num_threads(x: Tensor) -> int:
    return torch.get_num_threads() if x.numel() > _ALONE else 1


def _mask_of(scores: Tensor, mask: Mask) -> tuple[_Mask, Tensor]:
    """Return the structure for C, and the memory that it points to."""
    num_keys, num_threads = scores.shape[-1], _num_threads(scores)
    if mask.first + mask.cycle > num_keys:
        raise ValueError(f"{mask} sees more than {num_keys} keys")
    scratch = torch.empty(num_threads * (-(-num_keys // LANES) * LANES), dtype=torch.float32)
    num_rows, window = scores.numel() // max(1, num_keys), mask.window or 0
    return _Mask(num_rows, num_keys, mask.cycle, mask.first, window, num_threads, scratch.data_ptr()), scratch


def functions_for(x: Tensor) -> Rowwise | None:
    """Return the functions that compute rows like those of ``x``, or ``None`` if torch has to."""
    found = find(x.device.type, x.dtype)
    return None if isinstance(found, str) else found


@functools.cache
def find(device_type: str, dtype: torch.dtype) -> Rowwise | str:
    """Return the functions for a device and dtype, or why there are none."""
    library = load(dtype) if device_type == "cpu" else "they are for CPUs"
    if isinstance(library, str):
        return library
    functions = Rowwise(library)
    with torch.inference_mode(False), torch.enable_grad():
        return functions if all(_are_right(functions, dtype)) else "compiled functions give other results"


def describe(device_type: str, dtype: torch.dtype) -> str:
    """Return what computes rows, compiled functions or torch, and why."""
    found = find(device_type, dtype)
    by = f"torch ({found})" if isinstance(found, str) else f"compiled by {found.compiler}"
    return f"norms, gates, softmax and drawing: {by}"


def _are_right(functions: Rowwise, dtype: torch.dtype) -> Iterator[bool]:
    """Compare each function with torch on a few rows."""

    def probe(*shape: int, first: float = -3, last: float = 4) -> Tensor:
        return torch.linspace(first, last, math.prod(shape)).view(shape).to(dtype)

    def is_close(found: Tensor, expected: Tensor) -> bool:
        allowed = 16 * torch.finfo(dtype).eps * expected.abs().max()
        return bool((found - expected).abs().max() <= allowed)

    x, d_y = probe(5, 32), probe(5, 32, first=2, last=-1)
    for weight in (probe(32), probe(32).float()):
        leaves = [tensor.double().requires_grad_() for tensor in (x, weight)]
        y = F.rms_norm(leaves[0], (32,), leaves[1], 1e-6)
        d_x, d_weight = torch.autograd.grad(y, leaves, d_y.double())
        found_x, found_weight = functions.normalise_gradient(weight, 1e-6, x, d_y, True)
        assert found_weight is not None
        yield is_close(functions.normalise(weight, 1e-6, x), y)
        yield is_close(found_x, d_x) and is_close(found_weight, d_weight)

    both = probe(5, 64)
    gate, up = (part.double().requires_grad_() for part in both.split(32, 1))
    product, d_product = F.silu(gate) * up, d_y.clone()
    d_gate, d_up = torch.autograd.grad(product, [gate, up], d_y.double())
    yield is_close(functions.gate(both), product)
    found_up = torch.empty_like(d_y)
    parts = [part.contiguous() for part in both.split(32, 1)]
    functions.gate_gradient(parts[0], parts[1], d_product, found_up)
    yield is_close(found_up, d_up) and is_close(d_product, d_gate)

    logits, ids, d_logprobs = probe(4, 37), torch.tensor([36, 0, 36, 5]), torch.tensor([1.0, -2.0, 0.5, 3.0])
    row, firsts = torch.tensor([0, 0, 0, 2]), np.array([0, 3, 3, 4, 4])
    leaf = logits.double().requires_grad_()
    logprobs = leaf.log_softmax(-1)
    (d_logits,) = torch.autograd.grad(logprobs[row, ids], leaf, d_logprobs.double())
    sums = functions.log_sums(logits)
    yield is_close(logits.float() - (sums[0] + sums[1])[:, None], logprobs)
    functions.log_softmax_gradient(logits, sums, firsts, ids, d_logprobs)
    yield is_close(logits, d_logits)

    wide, numbers = probe(4, 600).float(), np.array([0.0, 0.3, 0.9, 1 - 2**-53])
    wide[0, :300] = -math.inf
    temperatures = torch.tensor([1.0, 0.5, 1.0, 2.0])
    scaled = (wide.double() / temperatures[:, None]).log_softmax(-1)
    tokens, found_logprobs, *found_sums = functions.draw(wide, temperatures, numbers)
    expected = torch.searchsorted(scaled.exp().cumsum(-1), torch.from_numpy(numbers)[:, None], right=True)
    yield bool(((tokens[:, None] - expected).abs() <= 1).all()) and int(tokens[0]) == 300
    yield is_close(found_logprobs, scaled.gather(1, tokens[:, None])[:, 0])
    logs = (wide.double() / temperatures[:, None]).logsumexp(-1) - wide.amax(-1) / temperatures
    yield is_close(found_sums[0], wide.amax(-1)) and is_close(found_sums[1], logs)

    key, query = torch.arange(37), torch.arange(30, 35)[:, None]
    for window in (None, 20):
        scores, d_p, mask = probe(2, 5, 37), probe(2, 5, 37, first=2, last=-1), Mask(5, 30, window)
        is_hidden = (key > query) | (query - key >= (window or 37))
        leaf = scores.double().requires_grad_()
        p = leaf.masked_fill(is_hidden, -math.inf).softmax(-1)
        (d_scores,) = torch.autograd.grad(p, leaf, d_p.double())
        found = scores.clone()
        functions.masked_softmax(found, mask)
        yield is_close(found, p)
        functions.masked_softmax_gradient(scores, d_p, mask)
        yield is_close(scores, p) and is_close(d_p, d_scores)
