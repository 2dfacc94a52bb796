"""A task of inspect-ai, where it is installed, asks a sampling client."""

import sys

import pytest

from lorimer.cookbook.evaluation import accuracy, exact_match
from lorimer.cookbook.inspect_tasks import inspect_tasks
from lorimer.cookbook.renderers import get_renderer
from lorimer.cookbook.service import get_tokenizer
from lorimer.errors import InvalidInput

ROWS = [{"question": f"What is {a} + {b}?", "answer": str(a + b)} for a in (2, 3) for b in (2, 3, 4)]


def test_missing_package_is_named(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "inspect_ai", None)
    with pytest.raises(InvalidInput, match="pip install inspect-ai"):
        inspect_tasks([], None, log_dir=tmp_path)


async def test_accuracy_of_a_task_is_our_own(service, tmp_path):
    inspect_ai = pytest.importorskip("inspect_ai")
    sample, exact, generate = (
        getattr(pytest.importorskip(f"inspect_ai.{module}"), name)
        for module, name in (("dataset", "Sample"), ("scorer", "exact"), ("solver", "generate"))
    )
    task = inspect_ai.Task(
        dataset=[sample(input=row["question"], target=row["answer"]) for row in ROWS],
        solver=generate(),
        scorer=exact(),
        name="sums",
    )
    sampler = await service.create_sampling_client_async(base_model="lorimer/tiny")
    renderer = get_renderer("auto", get_tokenizer(service, "lorimer/tiny"))
    found = await inspect_tasks(task, renderer, log_dir=tmp_path, max_tokens=8)(sampler)
    ours = await accuracy(ROWS, renderer, exact_match(), max_tokens=8)(sampler)
    assert found["inspect/sums/exact/mean"] == pytest.approx(ours["test/accuracy"])
