"""How often the host waits for the device, counted on a pretended one (`make test-device`), and the rules of that."""

import msgspec
import numpy as np
import pytest
import torch

from lorimer.engine.engine import Engine
from lorimer.engine.messages import CreateRun, Failed, LoraConfig, OptimizerConfig, OptimStep, PublishSampler
from lorimer.engine.training.trainer import Trainer, TrainItem
from lorimer.types.optim import OPTIMIZERS
from tests.engine.operations import make_operation, make_sample, register_gather, settings
from tests.engine.reference import DEVICE, checked, make_adapter, make_datum, on_device, open_pair

pytestmark = pytest.mark.skipif(DEVICE.type != "pretend", reason="needs LORIMER_TEST_DEVICE=pretend")
if DEVICE.type == "pretend":
    from tests.engine.pretend_device import PretendTensor, counting, synchronisations

LOSSES = ("cross_entropy", "importance_sampling", "ppo", "cispo", "dro", "gspo")
RUNS = {"one": 4, "two": 16, "three": 3}


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    engine = Engine(settings(tmp_path_factory.mktemp("cache"), token_budget=64))
    engine.register_loss(register_gather("r", "gather"))
    for name, rank in RUNS.items():
        engine.create_run(CreateRun(request_id="r", model_id=name, lora=LoraConfig(rank=rank, seed=1)))
        assert not any(isinstance(result, Exception) for result in engine.train([make_operation("r", name)]))
        engine.optim_step(OptimStep(request_id="r", model_id=name, params={"learning_rate": 0.1}))
        engine.publish_sampler(PublishSampler(request_id="r", model_id=name, sampler_id=name))
    return engine


def report():
    return "\n".join(f"{count} x {what}" for what, count in synchronisations.most_common())


def train(engine, operations):
    with counting() as found:
        results = engine.train(operations)
    for result in results:
        if isinstance(result, Exception):
            raise result
    return sum(found.values())


def sample(engine, *requests):
    """The largest count of a step, of those that compute prompts and of those that decode."""
    for request in requests:
        engine.add_sample(request)
    counts: dict[str, int] = {}
    while not engine.sampler.is_idle:
        before = engine.sampler.num_prefilled
        with counting() as found:
            replies = engine.sampler.step()
        assert not any(isinstance(reply, Failed) for reply in replies)
        kind = "decode" if engine.sampler.num_prefilled == before else "prefill"
        counts[kind] = max(counts.get(kind, 0), sum(found.values()))
    return counts


@pytest.mark.parametrize(("dtype", "largest", "relative"), [("float32", 1e-4, 1e-4), ("bfloat16", 0.75, 0.1)])
def test_a_model_read_from_files_computes_what_the_cpu_does(tmp_path, dtype, largest, relative):
    """Long sequences: what transformers does not store in files, such as rotary frequencies, must be there too."""
    found = []
    for device in ("cpu", "auto"):
        one = Engine(settings(tmp_path, model="lorimer/tiny", token_budget=128, device=device, dtype=dtype, seed=0))
        one.create_run(CreateRun(request_id="r", model_id="m", lora=LoraConfig(rank=4, seed=1)))
        (result,) = one.train([make_operation("r", "m", lengths=(90, 200, 17))])
        gradient = torch.cat([factor.flatten().cpu() for pair in one._run("m").grads.values() for factor in pair])
        found.append((np.concatenate(result.logprobs), gradient))
        assert one.info.device == ("cpu" if device == "cpu" else "pretend")
    (logprobs, gradient), (theirs, their_gradient) = found
    assert np.abs(logprobs - theirs).max() < largest
    assert (gradient - their_gradient).norm() < relative * their_gradient.norm()


# ── the engine ────────────────────────────────────────────────────────────────────────────────────────


def test_a_batch_of_all_losses_and_several_runs_waits_once(engine):
    operations = [
        make_operation(f"r{i}", name, loss_fn=loss, lengths=(9, 17, 5, 12))
        for i, loss in enumerate(LOSSES)
        for name in RUNS
    ]
    assert train(engine, operations) <= 10, report()
    assert sum(synchronisations.values()) == 1, report()
    assert engine.trainer.token_budget < sum(len(d.tokens) for o in operations for d in o.data) / 4, "several passes"


@pytest.mark.parametrize("optimizer", [name for name in OPTIMIZERS if name != "adafactor"])
def test_a_step_waits_a_few_times_however_many_weights_there_are(engine, optimizer):
    """Torch computes Adafactor weight by weight, and reads two numbers of each."""
    name, config = f"with {optimizer}", OptimizerConfig(type=optimizer)
    engine.create_run(CreateRun(request_id="r", model_id=name, lora=LoraConfig(rank=4, seed=1), optimizer=config))
    for _ in range(2):
        train(engine, [make_operation("r", name)])
        with counting() as found:
            engine.optim_step(OptimStep(request_id="r", model_id=name, params={"learning_rate": 0.01}))
        assert sum(found.values()) <= 7 < len(engine.model.targets), report()


def test_custom_losses_wait_once_for_each_pass(engine):
    operations = [make_operation("r", "one", lengths=(9, 17, 5, 12)), make_operation("s", "two", loss_fn="custom")]
    operations[1].loss_fn_config["loss_id"] = "gather"
    for datum in operations[1].data:
        datum.loss_fn_inputs["index"] = np.arange(3)
    assert train(engine, operations) <= 3, report()


def test_a_forward_pass_waits_once(engine):
    assert train(engine, [make_operation("r", "one", forward_only=True)]) == 1, report()


@pytest.mark.parametrize("architecture", ["qwen3_moe", "gpt_oss", "mixtral"])
def test_experts_wait_once_for_each_layer(architecture):
    model, _ = open_pair(architecture)
    batch = [
        TrainItem(
            checked([make_datum(loss, 9, i, model.vocab_size)], loss, model.vocab_size), make_adapter(model, 2 + i)
        )
        for i, loss in enumerate(LOSSES)
    ]
    with counting() as found:
        Trainer(model, 512).run(batch)
    assert sum(found.values()) <= 1 + len(model.steps), report()


@pytest.mark.parametrize(
    "options",
    [{}, {"temperature": 0.7, "top_k": 5, "top_p": 0.9}, {"temperature": 0.0}],
    ids=["plain", "truncated", "greedy"],
)
def test_a_sampler_step_with_adapters_waits_once(engine, options):
    requests = []
    for i, name in enumerate((*RUNS, None, "one")):
        request = make_sample(
            f"s{i}", prompt_seed=i, num_samples=2, max_tokens=20, topk_sample_logprobs=3, sampler_id=name
        )
        requests.append(msgspec.structs.replace(request, params=msgspec.structs.replace(request.params, **options)))
    counts = sample(engine, *requests)
    assert max(counts.values()) <= 3, report()
    assert counts == {"prefill": 1, "decode": 1}


def test_a_grammar_needs_no_further_wait(engine):
    assert sample(engine, make_sample("g", grammar="start: /[a-z]*/", num_samples=3))["decode"] == 1, report()


def test_scores_of_a_prompt_wait_once(engine):
    request = make_sample(
        "s",
        prompt_length=150,
        max_tokens=1,
        prompt_logprobs=True,
        topk_prompt_logprobs=4,
        prompt_alt_tokens_k=3,
        target_prompt_logprobs=np.full((149, 2), 5),
    )
    assert sample(engine, request)["prefill"] <= 2, report()


# ── the pretended device itself ───────────────────────────────────────────────────────────────────────


def test_devices_are_not_mixed():
    here, there = on_device(torch.ones(3)), torch.ones(3)
    for mix in (
        lambda: here + there,
        lambda: torch.cat([here, there]),
        lambda: there[on_device(torch.tensor([0]))],
        lambda: here.gather(0, torch.tensor([0])),
        lambda: torch.mm(here[None], there[:, None]),
        lambda: here.index_put_((on_device(torch.tensor([0, 1])),), torch.ones(2)),
        lambda: torch._foreach_add_([here], [there]),
    ):
        with pytest.raises(RuntimeError, match="same device"):
            mix()
    assert isinstance(here + torch.tensor(1.0), PretendTensor), "a tensor without dimensions may join"
    for convert in (here.numpy, lambda: np.asarray(here)):
        with pytest.raises(TypeError, match="numpy"):
            convert()


@pytest.mark.parametrize(
    ("act", "count"),
    [
        (lambda x: x.sum().item(), 1),
        (lambda x: bool(x.any()), 1),
        (lambda x: x.tolist(), 1),
        (lambda x: x.cpu(), 1),
        (lambda x: x.nonzero(), 1),
        (lambda x: x[x > 1], 1),
        (lambda x: x[torch.tensor([0])], 1),
        (lambda x: torch.tensor([1.0], device=x.device), 1),
        (lambda x: torch.ones(2).to(x.device), 1),
        (lambda x: torch.ones(2).to(x.device, non_blocking=True), 1),
        (lambda x: torch.ones(2).pin_memory().to(x.device, non_blocking=True), 0),
        (lambda x: x.masked_fill(x > 1, 0)[:2].sum() + x.new_zeros(()), 0),
        (lambda x: x.copy_(x.flip(0)).sort(), 0),
    ],
)
def test_what_makes_the_host_wait_is_counted(act, count):
    x = on_device(torch.arange(4.0))
    with counting() as found:
        act(x)
    assert sum(found.values()) == count


def test_values_and_gradients_are_those_of_the_cpu():
    values = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))
    found = []
    for make in (torch.clone, on_device):
        x = make(values).requires_grad_()
        (x.softmax(-1) @ x.t()).square().sum().backward()
        found.append(x.grad.cpu())
    assert torch.equal(*found)
