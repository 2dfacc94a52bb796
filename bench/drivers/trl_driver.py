"""Trains with TRL's trainers: ``python -m bench.drivers.trl_driver`` in an environment that has TRL.

Each call is one step of a whole ``train()`` of the trainer. The learning rate is 0, as on our side; gradients are
not clipped, and activations are kept, which is faster than TRL's default of computing them again.
"""

import tempfile
from collections.abc import Callable
from typing import Any

import torch
from datasets import Dataset
from peft import PeftModel
from transformers import AutoModelForCausalLM
from trl import GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

from bench.drivers.lines import serve
from bench.drivers.tokenizer import make_tokenizer

BATCH = 8
UNCLIPPED = 1e9


class Trl:
    """One model with one adapter; a trainer for each kind of step."""

    def __init__(self, model: str, adapter: str, dtype: str, num_threads: int, vocab_size: int) -> None:
        torch.set_num_threads(num_threads)
        self._directory, self._adapter, self._dtype = model, adapter, dtype
        self._tokenizer = make_tokenizer(vocab_size)
        self._trainers: dict[tuple[Any, ...], Any] = {}
        self._folder = tempfile.TemporaryDirectory()

    def sft(self, sequences: list[list[int]], batch_size: int) -> float:
        """Take a step over whole sequences, ``batch_size`` of them in each pass. Return the sum of the losses."""

        def make() -> SFTTrainer:
            kwargs = {"skip_prepare_dataset": True}
            args = SFTConfig(**self._arguments(batch_size, len(sequences)), dataset_kwargs=kwargs, max_length=None)
            return SFTTrainer(self._model(), args, train_dataset=rows, processing_class=self._tokenizer)

        rows = Dataset.from_list([{"input_ids": sequence, "labels": sequence} for sequence in sequences])
        trainer = self._trainer(make, "sft", batch_size, len(sequences))
        trainer.train_dataset = rows
        return trainer.train().training_loss * sum(len(sequence) - 1 for sequence in sequences)

    def grpo(
        self,
        prompts: list[list[int]],
        completions: list[list[int]],
        logprobs: list[list[float]],
        advantages: list[float],
        batch_size: int,
    ) -> float:
        """Take a step over given completions instead of new ones. Return the sum of the losses."""

        def make() -> FixedRollouts:
            args = self._grpo_config(batch_size, len(prompts), 2, len(completions[0]))
            return FixedRollouts(self._model(), no_reward, args, rows, processing_class=self._tokenizer)

        rows = Dataset.from_list([{"prompt": "0"} for _ in prompts])
        trainer = self._trainer(make, "grpo", batch_size, len(prompts))
        trainer.train_dataset = rows
        trainer.rollouts = prompts, completions, logprobs, advantages
        return trainer.train().training_loss * sum(map(len, completions))

    def iterate(self, prompts: list[list[int]], num_samples: int, num_new: int) -> int:
        """Sample and take a step over the samples. Return the number of sampled tokens."""
        num_sampled = 0

        def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
            nonlocal num_sampled
            num_sampled += sum(map(len, completion_ids))
            return torch.randn(len(completion_ids)).tolist()

        def make() -> GRPOTrainer:
            count = len(prompts) * num_samples
            args = self._grpo_config(min(BATCH, count), count, num_samples, num_new)
            return GRPOTrainer(self._model(), no_reward, args, rows, processing_class=self._tokenizer)

        rows = Dataset.from_list([{"prompt": " ".join(map(str, prompt))} for prompt in prompts])
        trainer = self._trainer(make, "iterate", len(prompts), num_samples, num_new)
        trainer.train_dataset, trainer.reward_funcs = rows, [reward]
        trainer.train()
        return num_sampled

    def _trainer(self, make: Callable[[], Any], *key: Any) -> Any:
        if key not in self._trainers:
            self._trainers[key] = make()
        return self._trainers[key]

    def _model(self) -> Any:
        base = AutoModelForCausalLM.from_pretrained(
            self._directory, dtype=getattr(torch, self._dtype), attn_implementation="sdpa", local_files_only=True
        )
        return PeftModel.from_pretrained(base, self._adapter, is_trainable=True, autocast_adapter_dtype=False)

    def _grpo_config(self, batch_size: int, num_sequences: int, num_generations: int, num_new: int) -> GRPOConfig:
        return GRPOConfig(
            **self._arguments(batch_size, num_sequences),
            num_generations=num_generations,
            max_completion_length=num_new,
            temperature=1.0,
            beta=0.0,
            epsilon=UNCLIPPED,
            loss_type="dapo",
            scale_rewards="none",
            shuffle_dataset=False,
        )

    def _arguments(self, batch_size: int, num_sequences: int) -> dict[str, Any]:
        """Return the arguments that both kinds of trainer have."""
        return {
            "output_dir": self._folder.name,
            "use_cpu": True,
            "bf16": False,
            "gradient_checkpointing": False,
            "per_device_train_batch_size": batch_size,
            "gradient_accumulation_steps": num_sequences // batch_size,
            "max_steps": 1,
            "learning_rate": 0.0,
            "lr_scheduler_type": "constant",
            "max_grad_norm": 0.0,
            "save_strategy": "no",
            "logging_strategy": "no",
            "report_to": "none",
            "disable_tqdm": True,
        }


class FixedRollouts(GRPOTrainer):  # type: ignore[misc]
    """GRPO without its sampling and rewards: the completions and advantages of a step are given."""

    rollouts: tuple[list[list[int]], list[list[int]], list[list[float]], list[float]]

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, torch.Tensor]:
        prompts, completions, logprobs, advantages = (torch.tensor(values) for values in self.rollouts)
        return {
            "prompt_ids": prompts,
            "prompt_mask": torch.ones_like(prompts),
            "completion_ids": completions,
            "completion_mask": torch.ones_like(completions),
            "old_per_token_logps": logprobs,
            "advantages": advantages,
            "num_items_in_batch": torch.tensor(completions.numel()),
        }


def no_reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [0.0] * len(completion_ids)


if __name__ == "__main__":
    serve(Trl)
