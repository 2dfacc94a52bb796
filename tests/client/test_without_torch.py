"""A machine without torch: everything but losses of one's own works."""

import os
import subprocess
import sys

from tests.conformance.servers import environment

PROGRAM = """
import asyncio, pickle, sys
sys.modules["torch"] = None  # importing it fails
import numpy as np
import lorimer
from lorimer import types

with lorimer.ServiceClient() as service:
    trainer = service.create_lora_training_client("lorimer/debug", rank=4, seed=7)
    tokenizer = trainer.get_tokenizer()
    tokens = tokenizer.encode("without torch")
    inputs = types.ModelInput.from_ints(np.array(tokens[:-1]))
    datum = types.Datum(inputs, {"target_tokens": np.array(tokens[1:]), "weights": [1.0] * inputs.length})
    first = trainer.forward_backward([datum], "cross_entropy").result()
    assert first.loss_fn_outputs[0]["logprobs"].to_numpy().shape == (inputs.length,)
    trainer.optim_step(types.AdamParams(learning_rate=1e-2)).result()
    path = trainer.save_state("kept").result().path
    again = service.create_training_client_from_state_with_optimizer(path)
    assert again.forward([datum], "cross_entropy").result().loss < first.loss
    sampler = pickle.loads(pickle.dumps(trainer.save_weights_and_get_sampling_client()))
    sampled = sampler.sample(inputs, 2, types.SamplingParams(max_tokens=3), topk_prompt_logprobs=2).result()
    assert len(sampled.sequences) == 2
    assert asyncio.run(sampler.compute_logprobs_async(inputs))[0] is None
    assert [one.tinker_path for one in lorimer.RestClient().list_checkpoints(trainer.model_id).result().checkpoints]
    needs_torch = [
        lambda: trainer.forward_backward_custom([datum], lambda data, logprobs_list: (logprobs_list[0].sum(), {})),
        lambda: service.create_custom_loss(lambda logprobs: (logprobs.sum(), {}), {"logprobs": 1}),
        lambda: first.loss_fn_outputs[0]["logprobs"].to_torch(),
    ]
    for call in needs_torch:
        try:
            call()
        except ImportError as error:
            print(error)
    assert trainer.forward([datum], "cross_entropy").result(30).loss < first.loss
"""


def test_everything_but_custom_losses(server):
    settings = environment(LORIMER_BASE_URL=server.url, LORIMER_API_KEY=os.environ["LORIMER_API_KEY"])
    run = subprocess.run([sys.executable, "-c", PROGRAM], env=settings, capture_output=True, text=True, timeout=90)
    assert run.returncode == 0, run.stderr
    told = run.stdout.splitlines()
    assert len(told) == 3
    assert all("needs PyTorch (pip install torch)" in line for line in told)
