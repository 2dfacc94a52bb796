"""The recipes of reinforcement learning: a step or two of each."""

import asyncio
import json

from lorimer.cookbook.logs import read_metrics
from lorimer.cookbook.word_problems import generate_problems
from lorimer.recipes.tool_use_rl import make_env
from tests.cookbook.rl.episodes import tiny_renderer

SMALL = {"steps": 2, "batch_size": 2, "group_size": 4}


def test_rl_loop(run_recipe, tmp_path):
    printed = run_recipe("rl_loop", save_every=1, **SMALL)
    assert "step 2/2" in printed
    assert "right answers in the first five steps" in printed
    state = json.loads((tmp_path / "log" / "state.json").read_text())
    assert state["step"] == len(state["rewards"]) == 2
    printed = run_recipe("rl_loop", save_every=1, **SMALL | {"steps": 3})
    assert "step 3/3" in printed
    assert "step 2/3" not in printed


def test_rl_basic(run_recipe, tmp_path):
    assert "trained: tinker://" in run_recipe("rl_basic", steps=1)
    first, last = read_metrics(tmp_path / "log")
    assert 0.1 < first["env/all/correct"] < 0.4
    assert {"test/correct"} <= first.keys() & last.keys()


def test_arithmetic_rl(run_recipe, tmp_path):
    printed = run_recipe("arithmetic_rl", num_questions=40, **SMALL)
    assert "right answers to 40 sums never seen" in printed
    first, *_, last = read_metrics(tmp_path / "log")
    assert 0.1 < first["sampled/accuracy"] < 0.35, "a fifth, as docs/tiny.md says of the base model"
    assert 0.2 < first["greedy/accuracy"] < 0.6
    assert {"sampled/accuracy", "greedy/accuracy"} <= last.keys()


def test_tool_use_rl(run_recipe, tmp_path):
    printed = run_recipe("tool_use_rl", sft_steps=2, **SMALL)
    assert "right answers to 100 products never seen" in printed
    assert read_metrics(tmp_path / "log" / "rl")[0]["env/all/turns_per_episode"] >= 1


def test_agent_rl(run_recipe, tmp_path):
    printed = run_recipe("agent_rl", sft_steps=2, num_questions=4, **SMALL)
    assert "4 products never seen, after the examples and after RL: " in printed and "gain in reward " in printed
    first = read_metrics(tmp_path / "log" / "rl")[0]
    assert first["env/all/episodes_lost"] == 0 and first["env/all/total_episodes"] == 8
    assert first["env/all/turns_per_episode"] >= 1 and "env/all/called" in first


def test_agent_rl_takes_any_agent_by_name(refused_recipe, tmp_path):
    code, said = refused_recipe("agent_rl", "--agent", "nowhere:play", "--base-url", "http://127.0.0.1:9")
    assert code and "agent is 'nowhere:play'; module:function is accepted" in said


def test_result_of_the_calculator_is_no_answer():
    """Nor is it one where the model used up its turns with calls."""
    renderer = tiny_renderer()

    async def rewards(*replies):
        env = make_env(renderer, (7, 36))
        results = [await env.step(renderer.tokenizer.encode(f"{reply}<|im_end|>")) for reply in replies]
        return [(result.reward, result.episode_done) for result in results]

    assert asyncio.run(rewards("<<7*36>>", "252")) == [(0, False), (1, True)]
    assert asyncio.run(rewards("<<7*36>>", "253")) == [(0, False), (0, True)]
    assert asyncio.run(rewards("<<7*36>>", "<<7*36>>", "<<7*36>>")) == [(0, False), (0, False), (0, True)]


def test_self_play(run_recipe, tmp_path):
    printed = run_recipe("self_play", sft_steps=2, steps=2, games=4)
    assert "winning move is found, two" in printed
    assert {"one/winning_moves", "two/winning_moves"} <= read_metrics(tmp_path / "log" / "rl")[-1].keys()


def test_rl_gsm8k(run_recipe, tmp_path):
    """Generated problems, a grader of one's own, and a second run that begins with the first one's model."""
    (tmp_path / "my_grader.py").write_text("def grade(reply, answer):\n    return 1 / (1 + len(reply))\n")
    data = tmp_path / "train.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in generate_problems(12)))
    options = SMALL | {"sft_steps": 2, "num_held_out": 4, "max_tokens": 24, "output": tmp_path / "model.txt"}
    printed = run_recipe("rl_gsm8k", **options)
    assert "the problems are generated" in printed
    reference = (tmp_path / "model.txt").read_text().strip()
    assert f"model: {reference}" in printed
    more = {"start_from": tmp_path / "model.txt", "grader": "my_grader:grade", "data": data, "off_policy": 1}
    run_recipe("rl_gsm8k", log_dir=tmp_path / "more", **options | more)
    assert (tmp_path / "model.txt").read_text().strip() != reference
    lines = read_metrics(tmp_path / "more")
    assert sum(line.get("grader/graded", 0) for line in lines) >= 2 * 8
    assert all(0 < line["env/all/correct"] <= 1 for line in lines[:2])
