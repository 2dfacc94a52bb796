"""Rows of the slab and stored prompts: what goes in comes out, within the limits."""

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from lorimer.engine.model.attention import Shape
from lorimer.engine.sampling.kv_cache import (
    BLOCK,
    MIN_SAVED,
    DecodeAttention,
    Past,
    PrefixStore,
    PromptCache,
    Slab,
    find_pasts,
)

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


SHAPES = {
    "plain": Shape(0.5),
    "window": Shape(0.5, window=6),
    "wide-window-softcap": Shape(0.4, window=25, softcap=1.5),
    "sinks": Shape(0.5, window=14, sinks=torch.linspace(-1, 1, 2 * HEADS)),
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("shared", [(0, 0, 0), (0, 0, 1, None, 1), (None, 2, 0, 1, 0, 2)], ids=str)
def test_rows_that_read_a_common_past_compute_the_same_as_with_copies(shared, shape):
    """``shared`` has the prompt of each row; prompt 2 begins as prompt 1 does."""
    generator = torch.Generator().manual_seed(0)
    prompts = [random_prompt(length, generator) for length in (20, 7, 23)]
    for mine, other in zip(prompts[2].layers, prompts[1].layers, strict=True):
        for x, y in zip(mine, other, strict=True):
            x[:, :7] = y
    pasts = [Past(prompts[0], 20), Past(prompts[1], 7), Past(prompts[1], 7)]
    copied, reading = Slab(10_000), Slab(10_000)
    for number in shared:
        prompt = random_prompt(5, generator) if number is None else prompts[number]
        copied.add(prompt)
        reading.add(prompt, None if number is None else pasts[number])
    order = torch.randperm(len(shared), generator=generator).tolist()
    for _ in range(3):
        q = torch.randn(len(shared), 2 * HEADS, SIZE, generator=generator)
        k, v = torch.randn(2, len(shared), HEADS, SIZE, generator=generator)
        outputs = []
        for slab in (copied, reading):
            slab.make_room()
            attention = DecodeAttention(slab, order, torch.device("cpu"))
            outputs.append([attention.attend_rows(layer, q, k, v, shape) for layer in range(LAYERS)])
            attention.finish()
        for a, b in zip(*outputs, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    for slab in (copied, reading):  # a row that ends takes the last one's past along
        slab.remove(0)
    assert reading.pasts[0] == (None if shared[-1] is None else pasts[shared[-1]])
    assert all(
        own + (past.length if past else 0) == whole
        for own, past, whole in zip(reading.lengths, reading.pasts, copied.lengths, strict=True)
    )


def random_prompt(length, generator):
    cache = PromptCache(length)
    for layer in range(LAYERS):
        k, v = torch.randn(2, HEADS, length, SIZE, generator=generator)
        cache.extend(layer, k, v, 0)
    cache.length = length
    return cache


def test_pasts_are_shared_where_that_saves_enough():
    long, short, lone = make_prompt(MIN_SAVED, 1), make_prompt(MIN_SAVED // 4, 2), make_prompt(2 * MIN_SAVED, 3)
    found = find_pasts([long, long, *[short] * 4, lone], [])
    assert found == {long: Past(long, MIN_SAVED)}
    found = find_pasts([long, *[short] * 4], [Past(long, MIN_SAVED), None, Past(short, MIN_SAVED // 4)])
    assert found == {prompt: Past(prompt, prompt.length) for prompt in (long, short)}


def test_prompts_with_a_common_prefix_share_it_with_the_first_that_had_it():
    first = make_prompt(3 * MIN_SAVED, 1)
    second = first.copy_prefix(MIN_SAVED, 4 * MIN_SAVED)
    third = second.copy_prefix(MIN_SAVED, 4 * MIN_SAVED)
    past = Past(first, MIN_SAVED)
    assert find_pasts([second, third], []) == {second: past, third: past}
    assert find_pasts([third], [past]) == {third: past}
    assert find_pasts([third], []) == {}
    del first, past
    assert find_pasts([second, third], []) == {}, "it is kept by rows that read it, not by its copies"


def test_pasts_count_once_in_the_limit():
    slab, prompt = Slab(200), make_prompt(100, 1)
    past = Past(prompt, 100)
    for _ in range(6):
        assert slab.can_add(100, past)
        slab.add(prompt, past)
    assert not slab.can_add(100, past)
    assert not slab.can_add(100, Past(make_prompt(100, 2), 100))
    slab.lengths = [16] * 6
    assert not slab.can_step()
    for row in (5, 4, 3):
        slab.remove(row)
    assert slab.can_step()


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


SIZE_OF_BLOCK = make_prompt(BLOCK, 0).memory_bytes
OWNERS = st.sampled_from([("", "w"), ("s", "w"), ("", "v")])
PROMPTS = st.lists(st.integers(0, 2), max_size=5).map(tuple)
"""The blocks of a prompt by number; few, so that many begin alike."""


class StoreModel(RuleBasedStateMachine):
    """The store beside a list of what it holds, the least recently used first, and nothing else."""

    LIMIT = 12 * SIZE_OF_BLOCK

    def __init__(self):
        super().__init__()
        self.store = PrefixStore(self.LIMIT)
        self.held: list[tuple[tuple[str, str], tuple[int, ...], PromptCache]] = []

    def evict(self, limit):
        while sum(cache.memory_bytes for *_, cache in self.held) > limit:
            self.held.pop(0)

    @rule(owner=OWNERS, blocks=PROMPTS, num_more=st.integers(0, BLOCK - 1))
    def put(self, owner, blocks, num_more):
        text = np.concatenate([*(np.full(BLOCK, block) for block in blocks), np.full(num_more, 9)]).astype(int)
        cache = make_prompt(len(text), 1)
        self.store.put(owner[0], owner[1], text, cache)
        known = [entry for entry in self.held if entry[:2] == (owner, blocks)]
        if known:
            self.held.remove(known[0])
            self.held.append(known[0])
        elif blocks and cache.memory_bytes <= self.LIMIT:
            self.held.append((owner, blocks, cache))
            self.evict(self.LIMIT)

    @rule(owner=OWNERS, blocks=PROMPTS, most=st.integers(0, 6 * BLOCK))
    def find(self, owner, blocks, most):
        text = np.concatenate([*(np.full(BLOCK, block) for block in blocks), []]).astype(int)
        prefixes = [n for n in range(1, len(blocks) + 1) if n * BLOCK <= most and self.holders(owner, blocks[:n])]
        found = self.store.find(owner[0], owner[1], text, most)
        if not prefixes:
            assert found is None
            return
        assert found is not None
        assert found[1] == max(prefixes) * BLOCK
        (used,) = (e for e in self.holders(owner, blocks[: max(prefixes)]) if e[2] is found[0])
        self.held.remove(used)
        self.held.append(used)

    def holders(self, owner, blocks):
        return [e for e in self.held if e[0] == owner and e[1][: len(blocks)] == blocks]

    @rule(num_blocks=st.integers(0, 12))
    def shrink(self, num_blocks):
        self.store.shrink(num_blocks * SIZE_OF_BLOCK)
        self.evict(num_blocks * SIZE_OF_BLOCK)

    @invariant()
    def memory_is_what_is_held(self):
        assert self.store.memory_bytes == sum(cache.memory_bytes for *_, cache in self.held) <= self.LIMIT
        assert [stored.cache for stored in self.store._entries.values()] == [cache for *_, cache in self.held]
        prefixes = {(e[0], e[1][:n]) for e in self.held for n in range(1, len(e[1]) + 1)}
        assert len(self.store._holders) == len(prefixes), "nothing stays of what was evicted"


def test_the_store_is_a_plain_list_whatever_is_asked_of_it():
    run_state_machine_as_test(StoreModel, settings=settings(max_examples=150, stateful_step_count=40, deadline=None))


def test_an_evicted_prompt_takes_no_prefix_from_one_that_stays():
    store = PrefixStore(5 * SIZE_OF_BLOCK)
    first = make_prompt(2 * BLOCK, 1)
    store.put("", "w", tokens(0, 100), first)
    store.put("", "w", tokens(0, 100, 200), make_prompt(3 * BLOCK, 2))
    store.put("", "w", tokens(0, 100), first)  # asked again, so the longer one goes first
    store.put("", "w", tokens(900), make_prompt(BLOCK, 3))
    assert store.find("", "w", tokens(0, 100), 2 * BLOCK) == (first, 2 * BLOCK)
    store.shrink(0)
    assert store.memory_bytes == 0


def test_a_copied_prefix_is_independent():
    original = make_prompt(10, 5)
    copy = original.copy_prefix(4, 20)
    original.layers[0][0].zero_()
    assert (copy.layers[0][0][:, :4] == 5).all()
    assert copy.layers[0][0].shape == (HEADS, 20, SIZE)
