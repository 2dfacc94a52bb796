"""The memory that engines and full runs need, reserved before it is taken."""

import math
from contextlib import AbstractContextManager
from pathlib import Path

import torch
from safetensors import safe_open

from lorimer.engine.model.base_model import BaseModel
from lorimer.engine.model.device import Device, free_bytes, label
from lorimer.engine.reservations import COPY_BYTES, STATE_BYTES, WEIGHT_BYTES, Reservation, reserve


def count_parameters(directory: Path, num_ranks: int = 1) -> int:
    """Return the number of parameters in the files of a Hugging Face directory, whose weights are not loaded.

    Of several ranks, return the most that one of them has: rows are divided, and the first ranks have the rest.
    """
    sizes: dict[str, int] = {}
    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118
                rows, *others = file.get_slice(name).get_shape() or [1]
                sizes[name] = -(-rows // num_ranks) * math.prod(others)
    return sum(sizes.values())


def reserve_memory(
    name: str, directory: Path, first: Device, device: torch.device, is_full: bool, num_ranks: int = 1
) -> tuple[Reservation, Reservation]:
    """Reserve the memory that an engine takes while it loads a model, and for a full run that of its training too.

    The model is loaded onto ``first``, and each of several ranks then keeps its part, and trains it, on ``device``.
    Return the reservation of ``device``, and that of ``first``, which may be the same. Raise `TooLarge` if a full run
    does not fit beside what is used and reserved.
    """
    number = count_parameters(directory)
    if not is_full:
        reservation = reserve(label(first.handle), loading=number * first.dtype.itemsize)
        return reservation, reservation
    part, is_same = count_parameters(directory, num_ranks), label(first.handle) == label(device)
    # Ranks have the copies only until they have divided the weights.
    loaded = number * (WEIGHT_BYTES + COPY_BYTES[str(first.dtype).removeprefix("torch.")])
    whose = "" if num_ranks == 1 else f"; each of {num_ranks} ranks"
    reservation = reserve(
        label(device),
        loading=loaded if is_same else WEIGHT_BYTES * part,
        outstanding=STATE_BYTES * part,
        what=f"full fine-tuning of {name!r} (weights, gradient, optimiser{whose})",
        free=lambda: free_bytes(device),
    )
    return reservation, reservation if is_same else reserve(label(first.handle), loading=loaded)


def room_for_copy(
    what: str, reservation: Reservation, model: BaseModel, is_averaged: bool = False
) -> AbstractContextManager[None]:
    """Reserve the memory of another copy of what passes compute with, while the block makes it.

    An average of the weights is float32, and rounded then. Raise `TooLarge` if there is not so much memory.
    """
    device, itemsize = model.device.handle, model.device.dtype.itemsize
    if is_averaged and itemsize < WEIGHT_BYTES:
        itemsize += WEIGHT_BYTES
    return reservation.taking(what, itemsize * model.num_parameters, lambda: free_bytes(device))
