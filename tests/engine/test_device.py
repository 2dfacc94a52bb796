"""The device seam on the CPU. Nothing here runs on CUDA or MPS, nor pretends to: their numbers are torch's own."""

import os
import time

import psutil
import pytest
import torch

from lorimer.engine.config import EngineConfig
from lorimer.engine.model.device import Device, choose_dtype, free_bytes, open_device, used_bytes
from lorimer.errors import InvalidInput

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_precision_is_measured_in_about_a_second():
    torch.set_num_threads(1)
    start = time.thread_time()
    assert choose_dtype(CPU) in (torch.float32, torch.bfloat16)
    assert 0.1 < time.thread_time() - start < 2


def test_an_accelerator_is_not_measured():
    start = time.thread_time()
    assert choose_dtype(torch.device("meta")) is torch.bfloat16
    assert time.thread_time() - start < 0.1


@pytest.mark.parametrize("name", ["cuda", "mps"])
def test_a_device_that_is_not_there_is_refused_by_name(name):
    if {"cuda": torch.cuda, "mps": torch.backends.mps}[name].is_available():
        pytest.skip(f"this machine has {name}")
    with pytest.raises(InvalidInput, match=rf"device '{name}' is not available on this machine; it has .*cpu"):
        open_device(EngineConfig(device=name))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_the_user_says_is_taken(dtype):
    device = open_device(EngineConfig(device="cpu", dtype=dtype, num_threads=1, memory_bytes=12345))
    assert (device.type, device.dtype, device.memory_bytes) == ("cpu", getattr(torch, dtype), 12345)
    assert torch.get_num_threads() == 1
    assert device.with_float64(torch.ones(2)).device.type == "cpu"
    assert device.product_dtype is device.dtype


def test_an_accelerator_multiplies_bfloat16_numbers_in_bfloat16():
    assert Device(torch.device("meta"), torch.float32, 0).product_dtype is torch.bfloat16


def test_by_default_all_cores_of_the_process_and_most_of_the_free_memory_are_used():
    device = open_device(EngineConfig(device="cpu", dtype="float32"))
    if hasattr(os, "sched_getaffinity"):
        assert torch.get_num_threads() == len(os.sched_getaffinity(0))
    assert 0 < device.memory_bytes <= 0.7 * psutil.virtual_memory().total


def test_auto_finds_a_device_that_works():
    device = open_device(EngineConfig(dtype="float32", num_threads=1))
    assert torch.ones(2, device=device.handle).sum().item() == 2


def test_used_memory_follows_allocations():
    before = used_bytes(CPU)
    held = torch.ones(100 << 18)
    assert used_bytes(CPU) - before > 0.9 * held.nbytes
    assert 0 < free_bytes(CPU) < psutil.virtual_memory().total
