"""Weights in large pages: the same numbers at other addresses, and no more memory."""

import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from lorimer.engine.model import large_pages
from lorimer.engine.model.large_pages import use_large_pages

SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or not SETTING.exists() or "[never]" in SETTING.read_text("ascii"),
    reason="this system has no large pages",
)


class Model(nn.Module):
    """An embedding that the head shares if it is tied, and layers of which one has odd sizes."""

    def __init__(self, weights, is_tied):
        super().__init__()
        self.embedding = nn.Embedding.from_pretrained(weights["embedding"])
        self.first, self.second = nn.Linear(1024, 3000), nn.Linear(3, 7)
        self.head = nn.Linear(1024, 3000, bias=False)
        for layer, name in ((self.first, "first"), (self.second, "second"), (self.head, "head")):
            layer.weight = nn.Parameter(weights[name], requires_grad=False)
        if is_tied:
            self.head.weight = self.embedding.weight


def regions():
    """Return the mapped regions of this process: first and last address, and what the system tells of each."""
    found = []
    for line in Path("/proc/self/smaps").read_text("utf-8").splitlines():
        name, *values = line.split()
        if not name.endswith(":"):
            found.append(([int(end, 16) for end in name.split("-")], {}))
        else:
            found[-1][1][name[:-1]] = values
    return found


def region_of(tensor):
    return next(told for (first, last), told in regions() if first <= tensor.data_ptr() < last)


@pytest.fixture
def weights(tmp_path):
    sizes = {"embedding": (3000, 1024), "first": (3000, 1024), "second": (7, 3), "head": (3000, 1024)}
    numbers = torch.Generator().manual_seed(0)
    made = {name: torch.randn(size, generator=numbers).bfloat16() for name, size in sizes.items()}
    save_file(made, tmp_path / "model.safetensors")
    return made, load_file(tmp_path / "model.safetensors")


@pytest.mark.parametrize("is_tied", [False, True])
def test_weights_of_a_file_are_copied_to_large_pages(weights, is_tied):
    made, mapped = weights
    model = Model(mapped, is_tied)
    use_large_pages(model)
    copied = [model.first.weight, model.second.weight, model.head.weight]
    for name, weight in zip(("first", "second", "embedding" if is_tied else "head"), copied, strict=True):
        assert torch.equal(weight, made[name])
        assert "hg" in region_of(weight)["VmFlags"]
    assert torch.equal(model.embedding.weight, made["embedding"])
    assert (model.embedding.weight is model.head.weight) == is_tied
    assert (model.embedding.weight.data_ptr() == mapped["embedding"].data_ptr()) == (not is_tied)


def test_the_pages_of_the_file_are_forgotten_and_can_be_read_again(weights, monkeypatch):
    made, mapped = weights
    monkeypatch.setattr(large_pages, "_CHUNK", 1 << 16)
    assert torch.equal(mapped["first"], made["first"])  # so that its pages are in memory
    before = int(region_of(mapped["first"])["Rss"][0])
    use_large_pages(Model(mapped, False))
    # Not 0: the system reads some pages around each that is missing.
    assert int(region_of(mapped["first"])["Rss"][0]) < before / 4
    assert torch.equal(mapped["first"], made["first"])


def test_weights_of_their_own_stay_where_they_are(weights):
    made, _ = weights
    model = Model({name: one.clone() for name, one in made.items()}, False)
    places = [one.data_ptr() for one in model.parameters()]
    use_large_pages(model)
    assert [one.data_ptr() for one in model.parameters()] == places
    assert torch.equal(model.first.weight, made["first"])


def test_a_system_without_large_pages_is_left_alone(weights, monkeypatch, tmp_path):
    (tmp_path / "enabled").write_text("always madvise [never]\n")
    model = Model(weights[1], False)
    places = [one.data_ptr() for one in model.parameters()]
    for setting in (tmp_path / "enabled", tmp_path / "missing"):
        monkeypatch.setattr(large_pages, "_SETTING", setting)
        use_large_pages(model)
        assert [one.data_ptr() for one in model.parameters()] == places
