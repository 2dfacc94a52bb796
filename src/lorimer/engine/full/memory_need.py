"""The memory that a full run needs, checked before it is taken."""

import math
from pathlib import Path

import torch
from safetensors import safe_open

from lorimer.engine.model.device import free_bytes
from lorimer.errors import TooLarge

WEIGHT_BYTES = 4
STATE_BYTES = 12
"""Bytes per parameter besides the weight: its gradient and two moments, float32."""


def count_parameters(directory: Path) -> int:
    """Return the number of parameters in the files of a Hugging Face directory, whose weights are not loaded."""
    sizes: dict[str, int] = {}
    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            sizes |= {name: math.prod(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    return sum(sizes.values())


def check_room(what: str, needed: int, device: torch.device) -> None:
    """Raise unless the device has ``needed`` bytes of free memory."""
    free = free_bytes(device)
    if needed > free:
        raise TooLarge(f"{what} needs {_gib(needed)}, {_gib(free)} free")


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB" if size >= 0.05 * 2**30 else f"{size / 2**20:.1f} MiB"
