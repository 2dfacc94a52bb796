"""The LoRA learning-rate rule."""

import json

import pytest

from lorimer.cookbook.hyperparams import lora_learning_rate
from lorimer.errors import InvalidInput


def test_rule_of_a_published_example():
    found = lora_learning_rate("meta-llama/Llama-3.1-8B")
    assert found.value == pytest.approx(2.856e-4, rel=1e-3)
    assert str(found) == (
        "learning rate 0.000286: 5e-05 of full fine-tuning, times 10 for LoRA of any rank, times "
        "(2000 / hidden size 4096) ** 0.781, as fitted for Llama models"
    )


def test_families_and_widths():
    assert lora_learning_rate("Qwen/Qwen3-8B").value == pytest.approx(5e-4 * (2000 / 4096) ** 0.0775)
    assert "hidden size 2048" in lora_learning_rate("Qwen/Qwen3-30B-A3B-Instruct").reason
    tiny = lora_learning_rate("lorimer/tiny")
    assert 3e-3 < tiny.value < 5e-3, "what docs/tiny.md has found to work"
    assert "no fit is known for 'lorimer/tiny'" in tiny.reason


def test_width_comes_from_the_config_of_a_directory(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"hidden_size": 500}), "utf-8")
    assert "hidden size 500" in lora_learning_rate("my/model", directory=tmp_path).reason
    assert "hidden size 500" in lora_learning_rate(str(tmp_path)).reason
    assert "hidden size 600" in lora_learning_rate("my/model", hidden_size=600).reason
    with pytest.raises(InvalidInput, match="hidden size of 'my/model' is not known"):
        lora_learning_rate("my/model")
