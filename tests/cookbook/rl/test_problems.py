"""Problems: the reward of a reply, graders that fail, and the order of a dataset."""

from typing import Any

import pytest

from lorimer.cookbook.evaluation import exact_match
from lorimer.cookbook.rl.envs import Env
from lorimer.cookbook.rl.graders import GraderPool
from lorimer.cookbook.rl.problems import GradedProblem, ProblemDataset, question_dataset
from lorimer.errors import InvalidInput
from tests.cookbook.rl.episodes import SumEnv, tiny_renderer

RENDERER = tiny_renderer()


def keep(item: Any) -> Env:
    """An item in place of its environment, to see the order."""
    return item


def reply(text: str) -> list[int]:
    return RENDERER.tokenizer.encode(text, add_special_tokens=False)


@pytest.mark.parametrize(
    ("text", "reward", "metrics"),
    [
        ("7<|im_end|>", 1.0, {"correct": 1, "format": 1, "malformed": 0}),
        ("8<|im_end|>", 0.0, {"correct": 0, "format": 1, "malformed": 0}),
        ("7", 0.9, {"correct": 1, "format": 0, "malformed": 1}),
        ("8", -0.1, {"correct": 0, "format": 0, "malformed": 1}),
    ],
)
async def test_reward_of_a_reply(text, reward, metrics):
    env = SumEnv(RENDERER, (3, 4))
    prompt, stop = await env.initial_observation()
    assert "What is 3 + 4?" in RENDERER.tokenizer.decode(prompt.to_ints())
    assert stop == RENDERER.get_stop_sequences()
    result = await env.step(reply(text))
    assert result.reward == pytest.approx(reward)
    assert result.episode_done
    assert result.metrics == metrics


async def test_graded_problem_takes_the_grade_and_counts_errors():
    async with GraderPool("tests.cookbook.rl.grading:length", num_workers=1) as pool:
        env = GradedProblem(RENDERER, "Say it.", "abc", pool)
        result = await env.step(reply("xyz<|im_end|>"))
        assert (result.reward, result.metrics["grader_error"]) == (1.0, 0.0)
        assert result.logs == {"reference_answer": "abc"}
    async with GraderPool("tests.cookbook.rl.grading:with_metrics", num_workers=1) as pool:
        result = await GradedProblem(RENDERER, "Say it.", "abc", pool).step(reply("x<|im_end|>"))
        assert result.reward == 0.0
        assert result.metrics["grader_error"] == 1.0
        assert "raised" in str(result.logs["grader_error"])


def test_dataset_order_depends_on_seed_and_epoch_alone():
    def items(dataset: ProblemDataset, index: int) -> list[object]:
        return [builder.env_thunk() for builder in dataset.get_batch(index)]

    def make(seed: int) -> ProblemDataset:
        return ProblemDataset(range(10), keep, batch_size=3, group_size=2, num_epochs=2, seed=seed)

    dataset = make(0)
    assert len(dataset) == 6
    epochs = [[item for index in range(start, start + 3) for item in items(dataset, index)] for start in (0, 3)]
    assert all(len(set(epoch)) == 9 for epoch in epochs)
    assert epochs[0] != epochs[1]
    assert items(make(0), 4) == items(dataset, 4)
    assert items(make(1), 4) != items(dataset, 4)


async def test_question_dataset_asks_rows_and_grades_replies():
    rows = [{"question": f"Say {n}.", "answer": str(n)} for n in range(6)]
    dataset = question_dataset(rows, RENDERER, exact_match(), batch_size=3, group_size=2, seed=1)
    assert len(dataset) == 2
    asked = set()
    for builder in [builder for index in range(2) for builder in dataset.get_batch(index)]:
        right, wrong = await builder.make_envs()
        answer = right.get_reference_answer()
        prompt, _ = await right.initial_observation()
        assert f"Say {answer}." in RENDERER.tokenizer.decode(prompt.to_ints())
        asked.add(answer)
        assert (await right.step(reply(f"{answer}<|im_end|>"))).reward == 1
        assert (await wrong.step(reply(f"{answer}0<|im_end|>"))).reward == 0
    assert asked == {row["answer"] for row in rows}


@pytest.mark.parametrize("batch_size", [0, 4])
def test_batch_of_no_size_is_refused(batch_size):
    with pytest.raises(InvalidInput, match="from 1 to 3"):
        ProblemDataset(range(3), keep, batch_size=batch_size, group_size=2)
