"""The run that the fault tests disturb, and what it must come to."""

from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

STEPS = 6


async def submit(service, user, run, seq_id):
    """Operation ``seq_id`` of the run that all tests make: train, train, step, again and again."""
    if seq_id % 3 == 0:
        return await service.step(user, run, seq_id)
    return await service.train(user, run, seq_id, shift=seq_id)


def assert_equal_weights(found: Path, expected: Path) -> None:
    (file,) = (name for name in ("adapter_model.safetensors", "model.safetensors") if (expected / name).exists())
    ours, theirs = (load_file(path / file) for path in (found, expected))
    assert ours.keys() == theirs.keys()
    for name in ours:
        np.testing.assert_allclose(ours[name], theirs[name], atol=1e-6)


async def undisturbed(service, user, session, number, **kind):
    run = await service.create(user, session, number, **kind)
    for seq_id in range(1, 3 * STEPS + 1):
        accepted = await submit(service, user, run, seq_id)
    await service.done(accepted)
    return await service.save(user, run, 3 * STEPS + 1, "end")
