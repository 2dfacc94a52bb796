"""`LORIMER_TEST_DEVICE=pretend` runs the tests of this folder on the pretended device (`make test-device`).

Engines of this process find it as `auto`. Those in processes of their own stay on the CPU.
"""

import torch

from lorimer.engine.model import device
from tests.engine.reference import DEVICE

if DEVICE.type != "cpu":
    device._choose = lambda name, index: DEVICE.handle if name == "auto" else torch.device(name)
