"""Rows of the slab and stored prompts: what goes in comes out, within the limits."""

import numpy as np
import pytest
import torch

from lorimer.engine.kv_cache import BLOCK, PrefixStore, PromptCache, Slab

LAYERS, HEADS, SIZE = 3, 2, 4


def make_prompt(length, fill):
    cache = PromptCache(length, 0)
    for layer in range(LAYERS):
        new = torch.full((HEADS, length, SIZE), float(fill + layer))
        cache.extend(layer, new, -new, 0)
    cache.length = length
    return cache


def row_value(slab, row):
    return slab.layer(0)[0][row, 0, 0, 0].item()


def test_rows_stay_dense_and_keep_their_values():
    slab = Slab(10_000)
    values = [10, 20, 30, 40, 50, 60]
    for i, value in enumerate(values):
        assert slab.add(make_prompt(5 + i, value)) == i
    assert slab.remove(1) == 5, "the last row moved into the hole"
    assert [row_value(slab, row) for row in range(5)] == [10, 60, 30, 40, 50]
    assert slab.lengths == [5, 10, 7, 8, 9]
    assert slab.remove(4) == 4
    assert slab.num_rows == 4


def test_growing_keeps_what_is_there():
    slab = Slab(10_000)
    slab.add(make_prompt(60, 7))
    slab.add(make_prompt(200, 9))
    for row, (length, value) in enumerate([(60, 7), (200, 9)]):
        keys = slab.layer(2)[0][row, :, :length]
        assert (keys == value + 2).all()
    capacity = slab.capacity
    slab.lengths = [capacity - 1, capacity]
    slab.make_room()
    assert slab.capacity > capacity
    assert (slab.layer(1)[1][1, :, :200] == -(9 + 1)).all()


def test_the_limit_holds_for_all_but_a_single_row():
    slab = Slab(200)
    assert slab.can_add(10_000), "a single row always fits"
    slab.add(make_prompt(50, 1))
    assert slab.can_add(50)
    slab.add(make_prompt(50, 2))
    slab.add(make_prompt(50, 3))
    assert not slab.can_add(50)
    slab.lengths = [slab.capacity] * 3
    assert not slab.can_step()
    slab.remove(2)
    slab.remove(1)
    assert slab.can_step()


def test_an_empty_slab_holds_no_memory():
    slab = Slab(1000)
    slab.add(make_prompt(5, 1))
    slab.remove(0)
    assert slab.capacity == 0


def tokens(*parts):
    return np.concatenate([np.arange(start, start + BLOCK) for start in parts])


def test_the_longest_shared_prefix_is_found():
    store = PrefixStore(1 << 20)
    first = make_prompt(3 * BLOCK, 1)
    store.put("", "w", tokens(0, 100, 200), first)
    found = store.find("", "w", tokens(0, 100, 300), 3 * BLOCK)
    assert found == (first, 2 * BLOCK)
    assert store.find("", "w", tokens(0, 100, 200), 3 * BLOCK) == (first, 3 * BLOCK)
    assert store.find("", "w", tokens(0, 100, 200), 3 * BLOCK - 1) == (first, 2 * BLOCK)
    assert store.find("", "w", tokens(1, 100, 200), 3 * BLOCK) is None


@pytest.mark.parametrize(("salt", "weights"), [("s", "w"), ("", "v"), ("w", "")])
def test_other_weights_and_salts_share_nothing(salt, weights):
    store = PrefixStore(1 << 20)
    store.put("", "w", tokens(0), make_prompt(BLOCK, 1))
    assert store.find(salt, weights, tokens(0), BLOCK) is None


def test_the_least_recently_used_prompt_goes_first():
    size = make_prompt(BLOCK, 0).memory_bytes
    store = PrefixStore(2 * size)
    for start in (0, 1000):
        store.put("", "w", tokens(start), make_prompt(BLOCK, start))
    assert store.find("", "w", tokens(0), BLOCK) is not None
    store.put("", "w", tokens(2000), make_prompt(BLOCK, 2000))
    assert store.memory_bytes == 2 * size
    assert store.find("", "w", tokens(1000), BLOCK) is None
    assert store.find("", "w", tokens(0), BLOCK) is not None


def test_prompts_too_large_or_too_short_are_not_kept():
    store = PrefixStore(10)
    store.put("", "w", tokens(0), make_prompt(BLOCK, 0))
    assert store.memory_bytes == 0
    store = PrefixStore(1 << 20)
    store.put("", "w", np.arange(BLOCK - 1), make_prompt(BLOCK - 1, 0))
    assert store.memory_bytes == 0


def test_a_copied_prefix_is_independent():
    original = make_prompt(10, 5)
    copy = original.copy_prefix(4, 20)
    original.layers[0][0].zero_()
    assert (copy.layers[0][0][:, :4] == 5).all()
    assert copy.layers[0][0].shape == (HEADS, 20, SIZE)
