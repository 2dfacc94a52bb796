"""The demo: both kinds of learning, the questions before and after, the picture, and a checkpoint one can use."""

import json
import re

import lorimer


def test_two_steps_of_each_kind(run_recipe, service, tmp_path):
    told = run_recipe("demo", supervised_steps=2, rl_steps=2, batch_size=4, group_size=2, num_questions=8)
    assert re.search(r"right of 8 +\d+% +\d+% +\d+%", told)
    assert (tmp_path / "log" / "curves.png").read_bytes().startswith(b"\x89PNG")
    steps = (tmp_path / "log" / "rl" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in steps] == [0, 1]
    path = re.search(r"checkpoint +(tinker://\S+)", told)[1]
    assert re.search(r"console +http://\S+/console/runs/\w+:train:\d+\s", told)
    sampler = service.create_sampling_client(model_path=path)
    answer = sampler.sample(lorimer.ModelInput.from_ints([5, 6]), 1, lorimer.SamplingParams(max_tokens=2)).result()
    assert len(answer.sequences[0].tokens) <= 2
