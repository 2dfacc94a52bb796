"""The weights tools of the official cookbook: download, merge, adapter. What they build gives the server's logprobs."""

import json

import pytest
import tinker

from tests.official_cookbook.workspace import STUDENT

pytestmark = pytest.mark.slow
TOKENS = [40, 85, 120, 300, 7, 512, 33, 260]
BUILD = """
import json, sys, torch
from peft import PeftModel
from tinker_cookbook import weights
from transformers import AutoModelForCausalLM
base, path, tokens = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
weights.download(tinker_path=path, output_dir="tools/adapter")
weights.build_hf_model(base_model=base, adapter_path="tools/adapter", output_path="tools/merged", dtype="float32")
weights.build_lora_adapter(base_model=base, adapter_path="tools/adapter", output_path="tools/peft")
load = lambda source: AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
models = {"base": load(base), "merged": load("tools/merged")}
models["peft"] = PeftModel.from_pretrained(load(base), "tools/peft")
ids = torch.tensor([tokens])
for name, model in models.items():
    logprobs = model(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
    print("RESULT", name, json.dumps(logprobs.tolist()))
"""


def test_download_merge_and_adapter_give_the_samplers_logprobs(cookbook, adder, figures):
    output = cookbook.python_output("-c", BUILD, STUDENT, adder.path(), json.dumps(TOKENS))
    lines = [line.split(maxsplit=2) for line in output.splitlines() if line.startswith("RESULT")]
    built = {name: json.loads(values) for _, name, values in lines}
    with tinker.ServiceClient(base_url=cookbook.url, api_key=cookbook.key) as service:
        sampler = service.create_sampling_client(adder.path("sampler_path"))
        served = sampler.compute_logprobs(tinker.ModelInput.from_ints(TOKENS)).result()[1:]
    gaps = {name: max(abs(a - b) for a, b in zip(values, served, strict=True)) for name, values in built.items()}
    figures(**{f"gap of {name}": gap for name, gap in gaps.items()})
    assert gaps["base"] > 0.1, "training changed nothing"
    assert gaps["merged"] < 1e-3
    assert gaps["peft"] < 1e-3
