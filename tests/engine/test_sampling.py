"""Sampling against the trainer's own log probabilities, alone and in full batches, with and without cached prompts."""

import numpy as np
import pytest
import torch

from lorimer.engine.adapters.adapters import snapshot
from lorimer.engine.messages import Datum, Done, SampleProgress, SampleRequest, SamplingParams
from lorimer.engine.model.base_model import load_tokenizer
from lorimer.engine.sampling.kv_cache import BLOCK
from lorimer.engine.sampling.sampler import Sampler
from lorimer.engine.training.trainer import Trainer, TrainItem
from lorimer.models.debug import make_debug_model
from tests.engine.reference import DENSE, MOE, checked, make_adapter, open_pair

EOS = 2


@pytest.fixture(scope="module")
def llama():
    return open_pair("llama")[0]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    directory = tmp_path_factory.mktemp("debug")
    make_debug_model(directory)
    return load_tokenizer(directory)


def make_sampler(model, memory_bytes=1 << 26, max_rows=64, tokenizer=None):
    return Sampler(model, tokenizer, [EOS], memory_bytes, max_rows)


def prompt_of(length, seed=0):
    return np.random.default_rng(seed).integers(3, 200, length)


def request(name, prompt, sampler_id=None, num_samples=1, **options):
    fields = {key: options.pop(key) for key in list(options) if key in SamplingParams.__struct_fields__}
    params = SamplingParams(**{"max_tokens": 8, "seed": 1, "stop": [], **fields})
    return SampleRequest(
        request_id=name,
        prompt=np.asarray(prompt),
        sampler_id=sampler_id,
        num_samples=num_samples,
        params=params,
        **options,
    )


def finish(sampler, *requests, adapters=None):
    """Run until everything is answered; results by request id."""
    results = {}
    for message in requests:
        sampler.add(message, (adapters or {}).get(message.sampler_id))
    while not sampler.is_idle:
        results |= {reply.request_id: reply.result for reply in sampler.step() if isinstance(reply, Done)}
    return results


def trainer_logprobs(model, tokens, adapter=None):
    """Of every token but the first, by the trainer."""
    tokens = np.asarray(tokens)
    if adapter is None:
        adapter = make_adapter(model)
        for _, b in adapter.weights.values():
            b.zero_()
    datum = Datum(tokens=tokens[:-1], loss_fn_inputs={"target_tokens": tokens[1:]})
    operation = checked([datum], "cross_entropy", model.vocab_size, forward_only=True)
    return Trainer(model, 4096).run([TrainItem(operation, adapter)])[0].logprobs[0]


@pytest.mark.parametrize("architecture", [*DENSE, *MOE])
@pytest.mark.parametrize("is_crowded", [False, True], ids=["alone", "full-batch"])
def test_sampled_and_prompt_logprobs_are_the_trainers(architecture, is_crowded):
    model, _ = open_pair(architecture)
    adapter = make_adapter(model, rank=8)
    adapters = {"mine": snapshot(adapter), "other": snapshot(make_adapter(model, rank=3, seed=9))}
    sampler = make_sampler(model)
    crowd = [
        request(f"c{i}", prompt_of(3 + 5 * i, 70 + i), ("other", None, "mine")[i % 3], 3, max_tokens=12, seed=i)
        for i in range(6 if is_crowded else 0)
    ]
    prompt = prompt_of(37)
    mine = [
        request("base", prompt, None, 4, max_tokens=12, prompt_logprobs=True),
        request("mine", prompt, "mine", 4, max_tokens=12, prompt_logprobs=True),
    ]
    results = finish(sampler, *crowd, *mine, adapters=adapters)
    # The prompt is in the prefix cache now.
    again = finish(sampler, *crowd, request("cached", prompt, "mine", 4, max_tokens=12), adapters=adapters)
    assert again["cached"].prompt_cache_hit_tokens == 32
    results |= again
    for name, run in (("base", None), ("mine", adapter), ("cached", adapter)):
        for sequence in results[name].sequences:
            expected = trainer_logprobs(model, np.concatenate([prompt, sequence.tokens]), run)
            assert abs(sequence.logprobs - expected[len(prompt) - 1 :]).max() < 1e-4
            if name != "cached":
                assert np.isnan(results[name].prompt_logprobs[0])
                assert abs(results[name].prompt_logprobs[1:] - expected[: len(prompt) - 1]).max() < 1e-4
    for seen, cached in zip(results["mine"].sequences, results["cached"].sequences, strict=True):
        assert seen.tokens.tolist() == cached.tokens.tolist()


def test_a_seeded_sequence_is_the_same_whatever_else_is_in_the_batch(llama):
    adapters = {"a": snapshot(make_adapter(llama, seed=1)), "b": snapshot(make_adapter(llama, rank=2, seed=2))}
    wanted = request("w", prompt_of(20), "a", 5, max_tokens=30, seed=7, temperature=0.8, top_k=50, top_p=0.95)
    crowd = [request(f"c{i}", prompt_of(5 + 9 * i, i), ("a", "b", None)[i % 3], 2, max_tokens=40) for i in range(8)]
    alone = finish(make_sampler(llama), wanted, adapters=adapters)["w"]
    crowded = finish(make_sampler(llama), *crowd, wanted, adapters=adapters)["w"]
    for a, b in zip(alone.sequences, crowded.sequences, strict=True):
        assert a.tokens.tolist() == b.tokens.tolist()
    assert len({tuple(s.tokens.tolist()) for s in alone.sequences}) == 5, "samples of one seed differ from one another"


def test_samples_without_a_seed_differ(llama):
    results = finish(make_sampler(llama), *(request(f"r{i}", prompt_of(5), seed=None) for i in range(4)))
    assert len({tuple(r.sequences[0].tokens.tolist()) for r in results.values()}) == 4


def test_temperature_zero_takes_the_likeliest_token_and_reports_temperature_one(llama):
    result = finish(
        make_sampler(llama), request("r", prompt_of(9), temperature=0, max_tokens=6, topk_sample_logprobs=3)
    )["r"]
    (sequence,) = result.sequences
    assert sequence.tokens.tolist() == sequence.topk_logprobs.token_ids[:, 0].tolist()
    expected = trainer_logprobs(llama, np.concatenate([prompt_of(9), sequence.tokens]))[8:]
    assert abs(sequence.logprobs - expected).max() < 1e-4
    assert abs(sequence.logprobs - sequence.topk_logprobs.logprobs[:, 0]).max() < 1e-6


def test_logprobs_are_of_the_temperature_scaled_distribution(llama):
    prompt = prompt_of(9)
    sampler = make_sampler(llama)
    all_of_them = request("top", prompt, max_tokens=1, temperature=1, topk_sample_logprobs=llama.vocab_size)
    scaled = request("r", prompt, max_tokens=1, temperature=0.5)
    results = finish(sampler, all_of_them, scaled)
    top = results["top"].sequences[0].topk_logprobs
    logprobs = torch.empty(llama.vocab_size)
    logprobs[torch.from_numpy(top.token_ids[0].astype(np.int64))] = torch.from_numpy(top.logprobs[0].copy())
    (sequence,) = results["r"].sequences
    assert sequence.logprobs[0] == pytest.approx((logprobs / 0.5).log_softmax(0)[sequence.tokens[0]].item(), abs=1e-4)


def test_draws_follow_the_distribution(llama):
    """2,000 draws against the probabilities they come from: chi-square of the ten likeliest tokens."""
    prompt = prompt_of(4)
    sampler = make_sampler(llama, max_rows=4096)
    result = finish(sampler, request("r", prompt, None, 2000, max_tokens=1, temperature=0.7, topk_sample_logprobs=10))[
        "r"
    ]
    top = result.sequences[0].topk_logprobs
    drawn = np.array([s.tokens[0] for s in result.sequences])
    expected = 2000 * np.exp(top.logprobs[0])
    found = np.array([(drawn == token).sum() for token in top.token_ids[0]])
    assert (((found - expected) ** 2) / expected).sum() < 35


@pytest.mark.parametrize(("top_k", "top_p"), [(3, 1.0), (-1, 0.3), (5, 0.5), (1, 1.0)])
def test_top_k_and_top_p_keep_only_the_likeliest(llama, top_k, top_p):
    prompt = prompt_of(4)
    sampler = make_sampler(llama, max_rows=512)
    result = finish(
        sampler, request("r", prompt, None, 300, max_tokens=1, top_k=top_k, top_p=top_p, topk_sample_logprobs=272)
    )["r"]
    top = result.sequences[0].topk_logprobs
    probabilities = np.exp(top.logprobs[0].astype(np.float64))
    kept = probabilities[: top_k if top_k > 0 else None]
    num_kept = int((np.cumsum(kept) < top_p * kept.sum() - 1e-9).sum()) + 1
    allowed = set(top.token_ids[0][:num_kept].tolist())
    drawn = {int(s.tokens[0]) for s in result.sequences}
    assert drawn <= allowed
    assert len(drawn) >= min(3, num_kept)


def test_end_of_sequence_stops_by_default_and_is_part_of_the_sample(llama):
    sampler = make_sampler(llama)
    result = finish(sampler, request("r", prompt_of(6), None, 200, max_tokens=40, stop=None))["r"]
    stopped = [s for s in result.sequences if s.stop_reason == "stop"]
    assert stopped
    assert all(s.tokens[-1] == EOS and EOS not in s.tokens[:-1] and len(s.logprobs) == len(s.tokens) for s in stopped)
    assert all(len(s.tokens) == 40 for s in result.sequences if s.stop_reason == "length")


def test_an_empty_stop_list_stops_at_nothing(llama):
    result = finish(make_sampler(llama), request("r", prompt_of(6), None, 200, max_tokens=20, stop=[]))["r"]
    assert all(len(s.tokens) == 20 and s.stop_reason == "length" for s in result.sequences)
    assert any(EOS in s.tokens for s in result.sequences)


def test_stop_tokens_end_a_sequence(llama):
    stops = [10, 11, 12, 13, 14, 15]
    result = finish(make_sampler(llama), request("r", prompt_of(6), None, 100, max_tokens=40, stop=stops))["r"]
    stopped = [s for s in result.sequences if s.stop_reason == "stop"]
    assert stopped
    assert all(s.tokens[-1] in {*stops, EOS} for s in stopped)


@pytest.mark.parametrize("as_list", [False, True], ids=["string", "list"])
def test_stop_strings_are_found_across_token_borders(llama, tokenizer, as_list):
    free = finish(make_sampler(llama, tokenizer=tokenizer), request("r", prompt_of(6), max_tokens=30))["r"].sequences[0]
    text = tokenizer.decode(free.tokens[10:14].tolist(), skip_special_tokens=False)
    stop = next(text[i : i + 2] for i in range(len(text) - 1) if "\ufffd" not in text[i : i + 2])
    stopping = request("r", prompt_of(6), max_tokens=30, stop=[stop, "never to be seen"] if as_list else stop)
    found = finish(make_sampler(llama, tokenizer=tokenizer), stopping)["r"].sequences[0]
    assert found.stop_reason == "stop"
    assert found.tokens.tolist() == free.tokens[: len(found.tokens)].tolist()
    assert stop in tokenizer.decode(found.tokens.tolist(), skip_special_tokens=False)
    assert stop not in tokenizer.decode(found.tokens[:-1].tolist(), skip_special_tokens=False)


def test_prompt_scores_of_every_kind_agree(llama):
    prompt = prompt_of(21)
    targets = np.stack([prompt[1:], np.full(20, -1), np.arange(20)], 1)
    result = finish(
        make_sampler(llama),
        request(
            "r",
            prompt,
            prompt_logprobs=True,
            topk_prompt_logprobs=llama.vocab_size,
            target_prompt_logprobs=targets,
            prompt_alt_tokens_k=4,
        ),
    )["r"]
    own = trainer_logprobs(llama, prompt)
    assert abs(result.prompt_logprobs[1:] - own).max() < 1e-4
    assert result.topk_prompt_logprobs.logprobs[0, 0] == -99999
    assert result.topk_prompt_logprobs.token_ids[0, 0] == 0
    dense = np.empty((21, llama.vocab_size), np.float32)
    np.put_along_axis(dense, result.topk_prompt_logprobs.token_ids.astype(int), result.topk_prompt_logprobs.logprobs, 1)
    assert abs(dense[np.arange(1, 21), prompt[1:]] - own).max() < 1e-4
    assert (np.diff(result.topk_prompt_logprobs.logprobs[1:], axis=1) <= 0).all()
    assert abs(result.target_prompt_logprobs[:, 0] - own).max() < 1e-4
    assert (result.target_prompt_logprobs[:, 1] == 0).all()
    assert abs(result.target_prompt_logprobs[:, 2] - dense[np.arange(1, 21), np.arange(20)]).max() < 1e-4
    assert result.prompt_alt_tokens.token_ids.shape == (20, 4)
    drawn = np.take_along_axis(dense[1:], result.prompt_alt_tokens.token_ids.astype(int), 1)
    assert abs(result.prompt_alt_tokens.logprobs - drawn).max() < 1e-4
    assert len(np.unique(result.prompt_alt_tokens.token_ids)) > 10


def test_scoring_only_the_tail_uses_the_cached_prefix(llama):
    prompt = prompt_of(60)
    sampler = make_sampler(llama)
    whole = finish(sampler, request("a", prompt, prompt_logprobs=True))["a"]
    tail = finish(sampler, request("b", prompt, prompt_logprobs=True, prompt_logprobs_last_n=10))["b"]
    assert whole.prompt_cache_hit_tokens == 0
    assert tail.prompt_cache_hit_tokens == 48
    assert np.isnan(tail.prompt_logprobs[:50]).all()
    assert abs(tail.prompt_logprobs[50:] - whole.prompt_logprobs[50:]).max() < 1e-5


def test_cached_prompts_are_kept_apart_by_weights_and_salt(llama):
    prompt = prompt_of(40)
    adapters = {"a": snapshot(make_adapter(llama))}
    sampler = make_sampler(llama)
    finish(sampler, request("r", prompt, cache_salt="ann"))
    hits = {
        (weights, salt): finish(sampler, request("r", prompt, weights, cache_salt=salt), adapters=adapters)[
            "r"
        ].prompt_cache_hit_tokens
        for weights in (None, "a")
        for salt in ("bob", "ann")
    }
    assert hits == {(None, "bob"): 0, (None, "ann"): 32, ("a", "bob"): 0, ("a", "ann"): 0}


def test_a_full_prefix_store_evicts_shared_prompts_and_changes_no_sample(llama):
    """Prompts share blocks, the earlier one is asked again, and others push them out."""
    begin = prompt_of(2 * BLOCK)
    longer = np.concatenate([begin, prompt_of(2 * BLOCK, 1)])
    others = [prompt_of(3 * BLOCK, seed) for seed in range(2, 8)]
    memory = 4 * (len(begin) + len(longer)) * llama.position_bytes  # a quarter is for prompts
    sampler = make_sampler(llama, memory_bytes=memory)
    for number, prompt in enumerate([begin, longer, begin, *others, begin, longer]):
        alone = finish(make_sampler(llama), request("it", prompt))["it"]
        found = finish(sampler, request(f"{number}", prompt))
        assert found[f"{number}"].sequences[0].tokens.tolist() == alone.sequences[0].tokens.tolist()
    assert sampler.num_cached > 0


def test_a_prompt_is_computed_once_for_all_its_samples_and_for_equal_prompts(llama):
    sampler = make_sampler(llama)
    finish(sampler, *(request(f"r{i}", prompt_of(30), None, 8, seed=i) for i in range(5)))
    assert sampler.num_prefilled == 30


@pytest.mark.parametrize("memory_bytes", [1 << 26, 1 << 18], ids=["ample", "tight"])
@pytest.mark.parametrize("architecture", ["llama", "gemma2", "gpt_oss", "phi3"])
def test_samples_that_read_one_prompt_are_those_of_samples_with_copies(architecture, memory_bytes, monkeypatch):
    """Samples of one prompt, prompts with a common prefix, and others, of two samplers and the base."""
    model, _ = open_pair(architecture)
    adapters = {name: snapshot(make_adapter(model, seed=i)) for i, name in enumerate("ab")}
    common = prompt_of(40)
    requests = [
        request("many", common, num_samples=6, max_tokens=20),
        request("adapted", common, "a", num_samples=4, max_tokens=12, temperature=0.8),
        *(request(f"tail{i}", [*common, *prompt_of(3 + i, i)], "a", seed=i) for i in range(4)),
        *(request(f"other{i}", prompt_of(10 + i, 50 + i), "b", seed=i) for i in range(3)),
        request("again", common, "a", num_samples=2, max_tokens=30, seed=9),
    ]
    found = []
    for min_saved in (16, 1 << 30):
        monkeypatch.setattr("lorimer.engine.sampling.kv_cache.MIN_SAVED", min_saved)
        sampler = make_sampler(model, memory_bytes, max_rows=12)
        finish(sampler, request("first", common, "a"), adapters=adapters)  # stored, so that others begin with it
        most = 0
        for message in requests:
            sampler.add(message, adapters.get(message.sampler_id))
        results = {}
        while not sampler.is_idle:
            results |= {reply.request_id: reply.result for reply in sampler.step() if isinstance(reply, Done)}
            most = max(most, len([past for past in sampler._slab.pasts if past is not None]))
        assert (most > 0) == (min_saved == 16)
        found.append(results)
    for name, expected in found[1].items():
        for ours, theirs in zip(found[0][name].sequences, expected.sequences, strict=True):
            assert ours.tokens.tolist() == theirs.tokens.tolist()
            np.testing.assert_allclose(ours.logprobs, theirs.logprobs, rtol=1e-5, atol=2e-5)


def test_memory_of_many_samples_is_one_prompt_and_what_each_has_sampled():
    model, _ = open_pair("llama", max_position_embeddings=2048)
    sampler = make_sampler(model)
    sampler.add(request("r", prompt_of(1024), num_samples=64, max_tokens=70), None)
    most = {}
    while not sampler.is_idle:
        sampler.step()
        if sampler._slab.num_rows:
            (past,) = set(sampler._slab.pasts)
            most[max(sampler._slab.lengths)] = past.prompt.memory_bytes + sampler._slab.memory_bytes
    for sampled, memory_bytes in most.items():
        if sampled >= 60:
            assert memory_bytes <= 1.3 * (1024 + 64 * sampled) * model.position_bytes


def test_long_prompts_are_computed_in_pieces(llama, monkeypatch):
    monkeypatch.setattr("lorimer.engine.sampling.sampler.PREFILL_TOKENS", 16)
    prompts = [prompt_of(50, 1), prompt_of(5, 2), prompt_of(33, 3)]
    results = finish(make_sampler(llama), *(request(f"r{i}", p, prompt_logprobs=True) for i, p in enumerate(prompts)))
    for i, prompt in enumerate(prompts):
        (sequence,) = results[f"r{i}"].sequences
        expected = trainer_logprobs(llama, np.concatenate([prompt, sequence.tokens]))
        assert abs(sequence.logprobs - expected[len(prompt) - 1 :]).max() < 1e-4
        assert abs(results[f"r{i}"].prompt_logprobs[1:] - expected[: len(prompt) - 1]).max() < 1e-4


@pytest.mark.parametrize("architecture", ["llama", "gpt_oss"])
def test_memory_pressure_preempts_and_changes_no_result(architecture):
    model, _ = open_pair(architecture)
    requests = [request(f"r{i}", prompt_of(10 + i, i), None, 4, max_tokens=120, seed=i) for i in range(4)]
    roomy, tight = make_sampler(model), make_sampler(model)
    tight._slab.max_positions = 500
    preempted = []
    enqueue = tight._enqueue
    tight._enqueue = lambda *args: (preempted.append(args), enqueue(*args))
    expected, found = finish(roomy, *requests), finish(tight, *requests)
    assert len(preempted) > len(requests), "something was preempted"
    for name, result in expected.items():
        for a, b in zip(result.sequences, found[name].sequences, strict=True):
            assert a.tokens.tolist() == b.tokens.tolist()
            assert abs(a.logprobs - b.logprobs).max() < 1e-4


def test_one_sequence_longer_than_all_memory_still_finishes(llama):
    sampler = make_sampler(llama, memory_bytes=1)
    (sequence,) = finish(sampler, request("r", prompt_of(10), max_tokens=100))["r"].sequences
    assert len(sequence.tokens) == 100


def test_requests_join_and_leave_between_steps(llama):
    sampler = make_sampler(llama)
    sampler.add(request("long", prompt_of(10), max_tokens=60), None)
    for _ in range(10):
        sampler.step()
    sampler.add(request("short", prompt_of(12, 1), max_tokens=3), None)
    order = []
    while not sampler.is_idle:
        order += [reply.request_id for reply in sampler.step() if isinstance(reply, Done)]
    assert order == ["short", "long"]


def test_cancelling_frees_the_rows_and_leaves_the_others_alone(llama):
    sampler = make_sampler(llama)
    expected = finish(make_sampler(llama), request("stay", prompt_of(10), None, 3, max_tokens=20))["stay"]
    sampler.add(request("go", prompt_of(9, 1), None, 5, max_tokens=50), None)
    sampler.add(request("stay", prompt_of(10), None, 3, max_tokens=20), None)
    for _ in range(5):
        sampler.step()
    assert sampler.cancel("go")
    assert not sampler.cancel("go")
    assert sampler.num_running == 3
    (reply,) = [r for _ in range(40) if not sampler.is_idle for r in sampler.step()]
    for a, b in zip(expected.sequences, reply.result.sequences, strict=True):
        assert a.tokens.tolist() == b.tokens.tolist()


def test_streaming_sends_every_token_before_the_result(llama):
    sampler = make_sampler(llama)
    sampler.add(request("r", prompt_of(5), None, 2, max_tokens=6, stream=True), None)
    seen = {0: [], 1: []}
    while not sampler.is_idle:
        for reply in sampler.step():
            if isinstance(reply, SampleProgress):
                seen[reply.index] += reply.tokens
            else:
                assert {i: s.tokens.tolist() for i, s in enumerate(reply.result.sequences)} == seen


def test_training_never_disturbs_a_sampler(llama):
    adapter = make_adapter(llama)
    adapters = {"s": snapshot(adapter)}
    before = finish(make_sampler(llama), request("r", prompt_of(8), "s", 2), adapters=adapters)["r"]
    for a, b in adapter.weights.values():
        a.add_(1.0)
        b.add_(1.0)
    after = finish(make_sampler(llama), request("r", prompt_of(8), "s", 2), adapters=adapters)["r"]
    for x, y in zip(before.sequences, after.sequences, strict=True):
        assert x.tokens.tolist() == y.tokens.tolist()
        assert (x.logprobs == y.logprobs).all()


def test_max_tokens_defaults_to_the_room_left(llama):
    (sequence,) = finish(make_sampler(llama), request("r", prompt_of(500), max_tokens=None))["r"].sequences
    assert len(sequence.tokens) == llama.max_context - 500
