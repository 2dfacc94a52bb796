"""Distillation on a real server: targets of the teacher, advantages, and a student that comes nearer."""

import numpy as np
import pytest

from lorimer import ModelInput
from lorimer.cookbook import distillation, supervised
from lorimer.cookbook.checkpoints import Checkpoints
from lorimer.cookbook.datasets import ShuffledDataset
from lorimer.cookbook.datums import datum_from_tokens
from lorimer.cookbook.distillation import Prompt, on_policy_datum, reverse_kl, soft_datum, teacher_logprobs
from lorimer.cookbook.logs import read_metrics
from lorimer.errors import InvalidInput
from tests.cookbook.weights import weights_of

MODEL = "lorimer/debug"
STUDENT = ModelInput.from_ints([3, 4, 5])
TEACHER = ModelInput.from_ints([9, 8, 7, 3, 4, 5])


@pytest.fixture(scope="module")
def base(service):
    return service.create_sampling_client(base_model=MODEL)


@pytest.fixture(scope="module")
def taught(service, tmp_path_factory):
    """A model that counts, as the path of its weights."""
    import asyncio

    data = [datum_from_tokens(range(first, first + 6), [0, 1, 1, 1, 1, 1]) for first in range(1, 21)]
    config = supervised.Config(
        log_dir=tmp_path_factory.mktemp("teacher"),
        base_model=MODEL,
        dataset=ShuffledDataset(data, 10, num_epochs=8),
        learning_rate=2e-2,
        rank=8,
        sinks=["jsonl"],
    )
    return asyncio.run(supervised.train(config, service)).checkpoint.sampler_path


async def test_soft_targets_are_the_teachers_likeliest_tokens(base):
    answer = [6, 7]
    datum = await soft_datum(base, Prompt(STUDENT, TEACHER), answer, k=5)
    targets, weights = (datum.loss_fn_inputs[name].to_numpy() for name in ("target_tokens", "weights"))
    assert datum.model_input.to_ints() == [3, 4, 5, 6]
    assert targets.shape == weights.shape == (4, 5)
    assert not weights[:2].any(), "the prompt is not learned"
    assert weights.sum() == pytest.approx(1.0)
    for place, read in ((2, TEACHER), (3, TEACHER.append_int(6))):
        scored = [await teacher_logprobs(base, read, [int(token)]) for token in targets[place]]
        probabilities = np.exp(np.concatenate(scored))
        assert weights[place] / weights[place].sum() == pytest.approx(probabilities / probabilities.sum(), rel=1e-3)
        assert np.all(np.diff(weights[place]) <= 0)
        assert len(set(targets[place].tolist())) == 5
    with pytest.raises(InvalidInput, match="k is 0"):
        await soft_datum(base, Prompt(STUDENT), answer, k=0)


async def test_student_learns_soft_targets(service, taught, log_dir):
    teacher = await service.create_sampling_client_async(taught)
    prompts = [Prompt(ModelInput.from_ints([first, first + 1])) for first in range(1, 13)]
    answers = await distillation.write_answers(
        teacher, [prompt.student for prompt in prompts], [], max_tokens=3, temperature=1.0
    )
    assert answers == [[]] * 12, "an answer that was cut is left out"
    data = [await soft_datum(teacher, prompt, [first + 2, first + 3], 8) for first, prompt in enumerate(prompts, 1)]
    config = supervised.Config(
        log_dir=log_dir,
        base_model=MODEL,
        dataset=ShuffledDataset(data, 6, num_epochs=4),
        learning_rate=1e-2,
        rank=8,
        sinks=["jsonl"],
        evaluators=[reverse_kl(teacher, prompts, [], 2)],
        eval_every=4,
    )
    await supervised.train(config, service)
    lines = read_metrics(log_dir)
    assert lines[7]["train/nll"] < lines[0]["train/nll"]
    assert lines[-1]["test/reverse_kl"] < lines[0]["test/reverse_kl"]


def test_advantage_of_a_token_is_what_the_teacher_thinks_of_it():
    of_teacher = np.array([-1.0, -2.0], np.float32)
    datum = on_policy_datum(STUDENT, [6, 7], [-3.0, -0.5], of_teacher, coef=2.0)
    assert datum.tokens.tolist() == [3, 4, 5, 6, 7]
    assert datum.mask.tolist() == [0, 0, 1, 1]
    assert datum.logprobs.tolist() == [0, 0, -3.0, -0.5]
    assert datum.advantages.tolist() == [0, 0, 4.0, -3.0]
    summed = on_policy_datum(STUDENT, [6, 7], [-3.0, -0.5], of_teacher, discount_factor=0.5)
    assert summed.advantages.tolist() == [0, 0, 2.0 - 0.75, -1.5]


def config(log_dir, taught, **changes):
    prompts = [Prompt(ModelInput.from_ints([first, first + 1])) for first in range(1, 17)]
    values = {
        "log_dir": log_dir,
        "base_model": MODEL,
        "dataset": ShuffledDataset(prompts, 8, num_epochs=6),
        "teacher_path": taught,
        "stop": [],
        "max_tokens": 3,
        "num_samples": 4,
        "learning_rate": 1e-2,
        "rank": 8,
        "sinks": ["jsonl"],
        "save_every": 2,
    }
    return distillation.Config(**(values | changes))


async def test_student_comes_nearer_to_its_teacher(service, taught, log_dir):
    await distillation.train(config(log_dir, taught), service)
    lines = read_metrics(log_dir)
    assert lines[-1]["reverse_kl"] < 0.85 * lines[0]["reverse_kl"]
    assert abs(lines[0]["optim/kl_sample_train_v1"]) < 0.01


async def test_interrupted_run_ends_as_an_uninterrupted_one(service, taught, log_dir):
    """To the bit, since no two samples are under way together, whose company would decide how they are rounded."""
    prompts = [Prompt(ModelInput.from_ints([first, first + 1])) for first in range(1, 7)]
    alone = {"dataset": ShuffledDataset(prompts, 1), "num_samples": 1}
    whole = await distillation.train(config(log_dir / "whole", taught, **alone), service)

    class Interrupted(Exception):
        pass

    async def interrupt(_):
        if len(read_metrics(log_dir / "cut")) == 5:
            raise Interrupted
        return {}

    breaking = config(log_dir / "cut", taught, evaluators=[interrupt], eval_every=1, **alone)
    with pytest.raises(Interrupted):
        await distillation.train(breaking, service)
    assert Checkpoints(log_dir / "cut").last().step == 4
    resumed = await distillation.train(config(log_dir / "cut", taught, **alone), service)

    def logged(name):
        lines = read_metrics(log_dir / name)
        return [{key: value for key, value in line.items() if not key.startswith("time/")} for line in lines]

    assert len(logged("whole")) == 6
    assert logged("cut") == logged("whole")
    assert len({weights_of(service, result.checkpoint.state_path) for result in (whole, resumed)}) == 1


async def test_teacher_may_read_another_prompt(service, base, log_dir):
    """The same weights with a longer prompt: what the student is to become when it reads the shorter one."""
    prompt = Prompt(STUDENT, TEACHER)
    measure = reverse_kl(base, [prompt] * 16, [], 2)
    before = await measure(base)
    settings = config(
        log_dir, None, dataset=ShuffledDataset([prompt] * 8, 8, num_epochs=10), max_tokens=2, evaluators=[measure]
    )
    result = await distillation.train(settings, service)
    assert before["test/reverse_kl"] > 0
    assert result.metrics["test/reverse_kl"] < before["test/reverse_kl"]
