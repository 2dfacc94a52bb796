"""A training program as a user writes it with the official SDK; it knows nothing of faults and catches nothing.

    python -m tests.faults.tenant PLAN

Fixed data and a fixed LoRA seed. Each step's two operations are submitted before the step before is waited for. Every
result is printed as a line of JSON; what differs between two runs of one plan is only ``seconds`` and ``path``.
"""

import json
import os
import sys
import time
from dataclasses import asdict, dataclass

import numpy as np
import tinker
from tinker import types

MODEL = "lorimer/debug"
VOCAB_SIZE = 272
PROMPT = [10, 20, 30, 40, 50]


@dataclass(frozen=True)
class Plan:
    seed: int = 0
    steps: int = 12
    sample_every: int = 4
    save_every: int = 5
    load_at: int = -1
    """After this step the newest checkpoint is loaded, with its optimiser."""
    tokens: int = 24
    """Of a datum."""
    full: bool = False
    """Train the model's own weights instead of an adapter."""

    @property
    def argument(self) -> str:
        return json.dumps(asdict(self))


class Program:
    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.began = time.monotonic()
        self.newest = ""
        service = tinker.ServiceClient()
        self.trainer = service.create_lora_training_client(
            f"{MODEL}:full" if plan.full else MODEL, rank=4, seed=plan.seed
        )

    def run(self) -> None:
        plan = self.plan
        self.tell(run=self.trainer.model_id)
        under_way = self.submit(0)
        for step in range(plan.steps):
            trained, stepped = under_way
            if step + 1 < plan.steps:
                under_way = self.submit(step + 1)
            loss, count = trained.result().metrics["loss:sum"], stepped.result().metrics["optimizer_step"]
            self.tell(step=step, loss=loss, count=count)
            if plan.sample_every and step % plan.sample_every == 0:
                self.sample(step)
            if plan.save_every and step % plan.save_every == 0:
                self.newest = self.trainer.save_state(f"step-{step}").result().path
                self.tell(saved=f"step-{step}", path=self.newest)
            if step == plan.load_at:
                self.trainer.load_state_with_optimizer(self.newest).result()
                self.tell(loaded=step)
        self.tell(end="end", path=self.trainer.save_state("end").result().path)

    def submit(self, step: int) -> tuple:
        trained = self.trainer.forward_backward(self.batch(step), "cross_entropy")
        return trained, self.trainer.optim_step(types.AdamParams(learning_rate=1e-3))

    def batch(self, step: int) -> list[types.Datum]:
        random = np.random.default_rng([self.plan.seed, step])
        rows = random.integers(3, VOCAB_SIZE, (3, self.plan.tokens + 1)).tolist()
        return [
            types.Datum(
                model_input=types.ModelInput.from_ints(row[:-1]),
                loss_fn_inputs={"target_tokens": row[1:], "weights": [1.0] * (len(row) - 1)},
            )
            for row in rows
        ]

    def sample(self, step: int) -> None:
        """From the weights as they are after what was submitted."""
        sampler = self.trainer.save_weights_and_get_sampling_client()
        params = types.SamplingParams(max_tokens=12, seed=step, temperature=1.0)
        answer = sampler.sample(types.ModelInput.from_ints(PROMPT), num_samples=2, sampling_params=params).result()
        self.tell(sampled=step, tokens=[list(sequence.tokens) for sequence in answer.sequences])

    def tell(self, **values: object) -> None:
        line = json.dumps({**values, "seconds": time.monotonic() - self.began})
        sys.stdout.write(line + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    Program(Plan(**json.loads(sys.argv[1]))).run()
    sys.stdout.flush()
    os._exit(0)  # threads that the official SDK leaves can abort an interpreter that ends in order
