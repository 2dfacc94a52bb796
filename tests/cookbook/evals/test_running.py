"""Tasks on a real server: grades against replies sampled by hand, an interruption, and results beside checkpoints."""

import asyncio
import json
import math
from typing import Any

import pytest

from lorimer import ModelInput, SamplingParams
from lorimer.chat.conversation import text_of
from lorimer.cookbook import supervised
from lorimer.cookbook.datasets import ShuffledDataset, datum_maker
from lorimer.cookbook.evals import judged
from lorimer.cookbook.evals.eval_tasks import SamplingSettings, file_task
from lorimer.cookbook.evals.judged import Judge, mt_bench_task
from lorimer.cookbook.evals.multiple_choice import multiple_choice_task, reply_logprob
from lorimer.cookbook.evals.named_models import find_model, open_model
from lorimer.cookbook.evals.running import Journal, Measured, journal_path, run_task, task_evaluator
from lorimer.errors import InvalidInput

MODEL = "lorimer/tiny"
ROWS = [{"question": f"What is {a} + {b}?", "answer": str(a + b)} for a in (2, 3, 57) for b in (2, 36)]
GREEDY = SamplingSettings(max_tokens=8)


@pytest.fixture(scope="module")
def sums(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "sums.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS), "utf-8")
    return str(path)


@pytest.fixture
async def model(service):
    return await open_model(service, await find_model(service, MODEL))


async def test_grades_are_those_of_greedy_replies(service, model, sums):
    replies = []
    for row in ROWS:
        prompt = model.renderer.build_generation_prompt([{"role": "user", "content": row["question"]}])
        params = SamplingParams(max_tokens=8, temperature=0, stop=model.renderer.get_stop_sequences())
        found = await model.sampling_client.sample_async(prompt, 1, params)
        replies.append(text_of(model.renderer.parse_response(found.sequences[0].tokens)[0]).strip())
    expected = [[float(reply == row["answer"])] for reply, row in zip(replies, ROWS, strict=True)]
    found = await run_task(file_task(sums, "exact", sampling=GREEDY), model, concurrency=2)
    assert found.grades == expected and 0 < sum(map(sum, expected)) < len(ROWS)
    stored = await found.store(service.create_rest_client(), MODEL)
    assert stored.value == pytest.approx(sum(map(sum, expected)) / len(ROWS))
    assert (stored.task, stored.num_items, stored.settings["max_tokens"]) == ("sums", 6, 8)


async def test_an_interrupted_evaluation_is_resumed(model, sums, tmp_path):
    task = file_task(sums, "exact", sampling=SamplingSettings(max_tokens=8, temperature=1.0, num_samples=3, seed=1))
    whole = await run_task(task, model)
    path = journal_path(tmp_path, task, "here")

    def stop(done, total):
        if done == 3:
            raise asyncio.CancelledError

    with Journal(path) as journal, pytest.raises(asyncio.CancelledError):
        await run_task(task, model, journal=journal, concurrency=1, report=stop)
    with path.open("ab") as file:
        file.write(b'{"item": "cut sho')
    seen = []
    with Journal(path) as journal:
        assert len(journal.outcomes) == 3
        found = await run_task(task, model, journal=journal, report=lambda done, total: seen.append((done, total)))
    assert found == whole, "neither the order nor the interruption changes a grade"
    assert seen == [(done, 6) for done in (3, 4, 5, 6)]
    assert len(path.read_text("utf-8").splitlines()) == 6
    others = [journal_path(tmp_path, task, "there"), journal_path(tmp_path, file_task(sums, "contains"), "here")]
    assert len({path, *others}) == 3


async def test_choices_are_compared_by_their_likelihood(model, tmp_path):
    rows: list[dict[str, Any]] = [
        {"question": row["question"], "choices": [row["answer"], "77", "I am 3 dogs"], "answer": 0} for row in ROWS
    ]
    path = tmp_path / "choices.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    task = multiple_choice_task(str(path))
    found = await run_task(task, model)
    assert sum(map(sum, found.grades)) >= 2
    outcome = await task.grade(model, task.items[0])
    for reply, logprob in zip(rows[0]["choices"], outcome.replies[0]["logprobs"], strict=True):
        prompt = model.renderer.build_generation_prompt([{"role": "user", "content": rows[0]["question"]}]).to_ints()
        said = model.renderer.tokenizer.encode(reply, add_special_tokens=False)
        whole = [*prompt, *said, *model.renderer.get_stop_sequences()[:1]]
        scored = await model.sampling_client.compute_logprobs_async(ModelInput.from_ints(whole))
        assert logprob == pytest.approx(sum(scored[len(prompt) :]), abs=1e-3)
    letters = multiple_choice_task(str(path), choices="letters")
    assert (await letters.grade(model, letters.items[0])).grades in ([0.0], [1.0])
    assert math.isfinite(await reply_logprob(model, "Hello", "you"))


async def test_every_judgement_has_a_verdict(model, tmp_path):
    """The judge writes none by itself, so that the likeliest is taken; of two equal models neither wins."""
    path = tmp_path / "turns.jsonl"
    path.write_text(json.dumps({"turns": ["Name a colour.", "Another."]}) + "\n", "utf-8")
    judge = Judge(MODEL, model, max_tokens=4)
    task = mt_bench_task(str(path), judge, sampling=SamplingSettings(max_tokens=6))
    outcome = await task.grade(model, task.items[0])
    assert outcome.grades[0] in judged.RATINGS.values() and task.metric == "rating"
    said = outcome.replies[0]
    assert said["conversation"].count("User: ") == 2 and said["judgement"].endswith("]]")
    pairs = mt_bench_task(
        str(path), judge, opponent=model, opponent_name=MODEL, sampling=SamplingSettings(max_tokens=6)
    )
    assert (await pairs.grade(model, pairs.items[0])).grades == [0.5]
    assert pairs.settings["against"] == MODEL != task.settings.get("against")
    with pytest.raises(InvalidInput, match="one reply"):
        mt_bench_task(str(path), judge, sampling=SamplingSettings(temperature=1.0, num_samples=2))


async def test_failures_name_the_item(model, sums, tmp_path):
    file = tmp_path / "bad.py"
    file.write_text("def grade(reply, row):\n    raise KeyError('nothing')\n", "utf-8")
    with pytest.raises(InvalidInput, match=r"bad\.py:grade failed on item [0-9a-f]+ with KeyError"):
        await run_task(file_task(sums, f"python:{file}:grade", sampling=GREEDY), model)


async def test_a_loop_stores_results_beside_its_checkpoints(service, model, sums, log_dir):
    """Only of steps that are saved and evaluated; those of other steps are metrics alone."""
    convert = datum_maker(model.renderer, max_length=64)
    rows = [{"prompt": row["question"], "completion": row["answer"]} for row in ROWS]
    config = supervised.Config(
        log_dir=log_dir,
        base_model=MODEL,
        base_url=service.holder.connection.base_url,
        dataset=ShuffledDataset(rows, 2, convert=convert, num_epochs=2),
        learning_rate=1e-3,
        rank=4,
        max_steps=4,
        eval_every=1,
        save_every=2,
        keep=None,
        evaluators=[task_evaluator(file_task(sums, "exact", sampling=GREEDY), model.renderer)],
        sinks=["jsonl"],
        name="stored results",
    )
    result = await supervised.train(config, service)
    rest = service.create_rest_client()
    run_id = (await rest.list_runs_async('name="stored results"')).runs[0].run_id
    found = (await rest.list_evaluations_async(run_id=run_id)).evaluations
    assert sorted((one.step, one.task, one.run_name) for one in found) == [
        (2, "sums", "stored results"),
        (4, "sums", "stored results"),
    ]
    last = next(one for one in found if one.step == 4)
    assert last.model == result.checkpoint.sampler_path
    assert last.value == pytest.approx(result.metrics["test/sums/accuracy"])
    again = await find_model(service, "stored results@last")
    assert again.name == last.model and (await find_model(service, f"{run_id}@2")).name != last.model
    with pytest.raises(InvalidInput, match="it has 2, 4 as steps"):
        await find_model(service, "stored results@3")
    saved = await open_model(service, again)
    same = await run_task(file_task(sums, "exact", sampling=GREEDY), saved)
    assert Measured("sums", "accuracy", {}, [], same.grades).estimates()["accuracy"] == pytest.approx(last.value)


async def test_models_that_are_not_there_are_refused(service):
    for wrong, words in (("nothing", "accepted are"), ("nobody@last", "no run is called")):
        with pytest.raises(InvalidInput, match=words):
            await find_model(service, wrong)


async def test_concurrency_is_bounded(model, sums):
    task = file_task(sums, "exact", sampling=GREEDY)
    running, most = 0, 0

    class Watched:
        name, metric, items, settings = task.name, task.metric, task.items, task.settings

        async def grade(self, asked, item):
            nonlocal running, most
            running += 1
            most = max(most, running)
            await asyncio.sleep(0)
            outcome = await task.grade(asked, item)
            running -= 1
            return outcome

    await run_task(Watched(), model, concurrency=2)
    assert most == 2
