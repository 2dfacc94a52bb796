"""The weights tools of the official cookbook: download, merge, adapter. What they build gives the server's logprobs."""

import json

import pytest

import lorimer
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


def test_download_merge_and_adapter_give_the_samplers_logprobs(cookbook, figures):
    """The model ties its head to its embedding, and the merge cannot change one alone: the head is not trained."""
    datum = lorimer.Datum(
        model_input=lorimer.ModelInput.from_ints(TOKENS[:-1]),
        loss_fn_inputs={"target_tokens": TOKENS[1:], "weights": [1.0] * (len(TOKENS) - 1)},
    )
    with lorimer.ServiceClient(base_url=cookbook.url, api_key=cookbook.key) as service:
        trainer = service.create_lora_training_client(STUDENT, rank=8, train_unembed=False)
        for _ in range(3):
            trainer.forward_backward([datum], "cross_entropy").result()
            trainer.optim_step(lorimer.AdamParams(learning_rate=1e-3)).result()
        state = trainer.save_state("trained").result().path
        sampler = trainer.save_weights_and_get_sampling_client()
        served = sampler.compute_logprobs(lorimer.ModelInput.from_ints(TOKENS)).result()[1:]
    output = cookbook.python_output("-c", BUILD, STUDENT, state, json.dumps(TOKENS))
    lines = [line.split(maxsplit=2) for line in output.splitlines() if line.startswith("RESULT")]
    built = {name: json.loads(values) for _, name, values in lines}
    gaps = {name: max(abs(a - b) for a, b in zip(values, served, strict=True)) for name, values in built.items()}
    figures(**{f"gap of {name}": gap for name, gap in gaps.items()})
    assert gaps["base"] > 0.1, "training changed nothing"
    assert gaps["merged"] < 0.05, "the merge keeps the base model's bfloat16"
    assert gaps["peft"] < 1e-3
