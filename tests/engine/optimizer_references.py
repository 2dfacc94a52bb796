"""Independent references of the optimisers: torch's classes, and formulas in NumPy for those that torch lacks.

Each takes named weights, and in `step` the gradients, the fields of the step and a multiplier for each weight.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

Groups = Mapping[str, frozenset[str]]


class TorchReference:
    """One of torch's optimisers with a parameter group for each weight; Muon has two of them."""

    def __init__(self, name: str, weights: Mapping[str, Tensor], groups: Groups) -> None:
        self.name = name
        self.parameters = {key: torch.nn.Parameter(tensor.clone()) for key, tensor in weights.items()}
        kinds: dict[str, Any] = {
            "adamw": torch.optim.AdamW,
            "adam": torch.optim.Adam,
            "sgd": torch.optim.SGD,
            "adafactor": torch.optim.Adafactor,
        }
        self.optimizers = {}
        self.matrices: dict[str, list[torch.nn.Parameter]] = {}
        for key, parameter in self.parameters.items():
            if name != "muon":
                self.optimizers[key] = kinds[name]([parameter])
            elif parameter.dim() > 1 and not groups[key] & {"embed", "unembed"}:
                # torch's Muon takes plain matrices, so each of a stack is a parameter of its own.
                parts = parameter.detach().reshape(-1, *parameter.shape[-2:])
                self.matrices[key] = [torch.nn.Parameter(part.clone()) for part in parts]
                self.optimizers[key] = torch.optim.Muon(self.matrices[key])
            else:
                self.optimizers[key] = torch.optim.AdamW([parameter])

    def step(self, grads: Mapping[str, Tensor], fields: Mapping[str, Any], multipliers: Mapping[str, float]) -> None:
        for key, optimizer in self.optimizers.items():
            settings = self._settings(fields, multipliers[key], key)
            optimizer.param_groups[0].update(settings)
            for index, part in enumerate(self.matrices.get(key, ())):
                part.grad = grads[key].reshape(-1, *part.shape)[index].clone()
            self.parameters[key].grad = grads[key].clone()
            optimizer.step()

    def _settings(self, fields: Mapping[str, Any], multiplier: float, key: str) -> dict[str, Any]:
        adam = "" if self.name != "muon" else "adamw_"
        if self.name in ("adamw", "adam") or (self.name == "muon" and key not in self.matrices):
            return {
                "lr": fields[f"{adam}learning_rate"] * multiplier,
                "betas": (fields[f"{adam}beta1"], fields[f"{adam}beta2"]),
                "eps": fields[f"{adam}eps"],
                "weight_decay": fields[f"{adam}weight_decay"],
            }
        own = {name: value for name, value in fields.items() if not name.startswith("adamw_")}
        if self.name == "adafactor":
            own["eps"] = own.pop("eps1"), own.pop("eps2")
        return {**own, "lr": own.pop("learning_rate") * multiplier}

    @property
    def weights(self) -> dict[str, Tensor]:
        return {
            key: torch.stack([part.detach() for part in self.matrices[key]]).reshape(parameter.shape)
            if key in self.matrices
            else parameter.detach()
            for key, parameter in self.parameters.items()
        }


class NumpyReference:
    """A formula in float64 for one weight at a time."""

    def __init__(self, name: str, weights: Mapping[str, Tensor], groups: Groups) -> None:
        self.w = {key: tensor.numpy().astype(np.float64) for key, tensor in weights.items()}
        self.state: dict[str, dict[str, Any]] = {key: {} for key in weights}
        self.num_steps = 0
        self.update = {"lion": _lion, "schedule_free_adamw": _schedule_free, "adamw8bit": _adamw8bit}[name]

    def step(self, grads: Mapping[str, Tensor], fields: Mapping[str, Any], multipliers: Mapping[str, float]) -> None:
        self.num_steps += 1
        for key, multiplier in multipliers.items():
            scaled = {**fields, "learning_rate": fields["learning_rate"] * multiplier}
            g = grads[key].numpy().astype(np.float64)
            self.w[key] = self.update(self.w[key], g, self.state[key], self.num_steps, scaled)

    @property
    def weights(self) -> dict[str, Tensor]:
        return {key: torch.from_numpy(w.astype(np.float32)) for key, w in self.w.items()}


def _lion(w: np.ndarray, g: np.ndarray, state: dict[str, Any], k: int, f: Mapping[str, Any]) -> np.ndarray:
    m = state.get("m", np.zeros_like(w))
    direction = np.sign(f["beta1"] * m + (1 - f["beta1"]) * g)
    state["m"] = f["beta2"] * m + (1 - f["beta2"]) * g
    return w - f["learning_rate"] * (direction + f["weight_decay"] * w)


def _schedule_free(y: np.ndarray, g: np.ndarray, state: dict[str, Any], k: int, f: Mapping[str, Any]) -> np.ndarray:
    """Write down x, y and z of the paper (Defazio et al., "The Road Less Scheduled", 2024), each kept by itself."""
    x, z, v = state.get("x", y), state.get("z", y), state.get("v", np.zeros_like(y))
    lr, beta1, beta2 = f["learning_rate"], f["beta1"], f["beta2"]
    v = beta2 * v + (1 - beta2) * g * g
    move = g / (np.sqrt(v / (1 - beta2**k)) + f["eps"]) + f["weight_decay"] * y
    z = z - lr * move
    largest = max(lr, state.get("largest", 0.0))
    share = k ** f["r"] * largest ** f["weight_lr_power"]
    total = state.get("total", 0.0) + share
    c = share / total if total else 0.0
    x = (1 - c) * x + c * z
    state.update(x=x, z=z, v=v, largest=largest, total=total)
    return (1 - beta1) * z + beta1 * x


def dynamic_map(is_signed: bool) -> np.ndarray:
    """List the 256 numbers of the dynamic data type with seven exponents."""
    positive = []
    for exponent in range(7):
        count = 2**exponent * (1 if is_signed else 2)
        width = 0.9 / count
        positive += [10.0 ** (exponent - 6) * (0.1 + width * (i + 0.5)) for i in range(count)]
    return np.array(sorted([0.0, 1.0, *positive, *([-p for p in positive] if is_signed else [])]))


def _adamw8bit(w: np.ndarray, g: np.ndarray, state: dict[str, Any], k: int, f: Mapping[str, Any]) -> np.ndarray:
    m, v = state.get("m", np.zeros_like(w)), state.get("v", np.zeros_like(w))
    lr, beta1, beta2 = f["learning_rate"], f["beta1"], f["beta2"]
    m, v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g * g
    is_small = w.size < 4096
    state["m"], state["v"] = (m, v) if is_small else (_rounded(m, True), _rounded(v, False))
    update = (m / (1 - beta1**k)) / (np.sqrt(v / (1 - beta2**k)) + f["eps"])
    return w - lr * (update + f["weight_decay"] * w)


def _rounded(numbers: np.ndarray, is_signed: bool) -> np.ndarray:
    """Round each number to the nearest of its block of 256, scaled by the largest of the block."""
    flat, values = numbers.reshape(-1), dynamic_map(is_signed)
    rounded = np.empty_like(flat)
    for start in range(0, len(flat), 256):
        block = flat[start : start + 256]
        scale = np.abs(block).max() or 1.0
        nearest = np.abs(block[:, None] / scale - values[None]).argmin(1)
        rounded[start : start + 256] = values[nearest] * scale
    return rounded.reshape(numbers.shape)


def newton_schulz(
    matrix: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float, *, is_rounded: bool
) -> Tensor:
    """Return Muon's iteration with sums in float64, rounded to bfloat16 where torch rounds, or nowhere."""

    def rounded(x: Tensor) -> Tensor:
        return x.float().bfloat16().double() if is_rounded else x

    a, b, c = coefficients
    x = rounded((matrix if matrix.size(0) <= matrix.size(1) else matrix.T).double())
    x = rounded(x / rounded(x.norm()).clamp(min=eps))
    for _ in range(steps):
        gram = rounded(x @ x.T)
        x = rounded(a * x + rounded(b * gram + c * (gram @ gram)) @ x)
    return (x if matrix.size(0) <= matrix.size(1) else x.T).float()


def make_reference(name: str, weights: Mapping[str, Tensor], groups: Groups) -> TorchReference | NumpyReference:
    is_numpy = name in ("lion", "schedule_free_adamw", "adamw8bit")
    return (NumpyReference if is_numpy else TorchReference)(name, weights, groups)
