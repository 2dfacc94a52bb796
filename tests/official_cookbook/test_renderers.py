"""Renderers, token by token, beside those of the official cookbook, with the tokenizers of real models too."""

import json
import os
import subprocess
from pathlib import Path

import pytest

import official_renders
from lorimer.cookbook import model_info, renderers
from tests.official_cookbook.environment import cookbook_python

pytestmark = pytest.mark.slow
ASSETS = os.environ.get("LORIMER_ASSETS")
ELSEWHERE = ("llama3", "deepseek", "glm5_3", "gpt_oss")
"""Formats whose marks are no tokens of Qwen3."""
NAMES = {
    "qwen3": tuple(name for name in official_renders.NAMES if not name.startswith(ELSEWHERE)),
    "smollm2": ("role_colon", "qwen3", "qwen3_disable_thinking", "qwen3_instruct"),
}


def test_record_is_what_the_official_cookbook_makes():
    assert official_renders.official(official_renders.BUNDLED) == official_renders.read_record()


@pytest.mark.skipif(not ASSETS, reason="LORIMER_ASSETS names no directory with tokenizers")
@pytest.mark.parametrize("tokenizer", NAMES)
def test_tokens_are_the_official_ones_with_a_real_tokenizer(tokenizer):
    directory = Path(ASSETS or "") / "tokenizers" / tokenizer
    ours = official_renders.record(renderers, official_renders.tokenizer_of(directory), list(NAMES[tokenizer]))
    assert json.loads(json.dumps(ours)) == official_renders.official(directory, NAMES[tokenizer])


def test_recommendations_are_the_official_ones():
    code = (
        "import json, sys; from tinker_cookbook.model_info import get_recommended_renderer_names as names;"
        "print(json.dumps({model: names(model) for model in json.load(sys.stdin)}))"
    )
    run = subprocess.run(
        [cookbook_python(), "-c", code],
        input=json.dumps(list(model_info.RENDERERS)),
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(run.stdout) == {model: list(names) for model, names in model_info.RENDERERS.items()}
