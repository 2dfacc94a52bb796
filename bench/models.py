"""Defines the benchmark models, with random seeded weights, and the size of each workload.

Throughput does not depend on the values of the weights, so nothing is downloaded. A model is written once as a Hugging
Face directory, which both sides load.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

RANK = 32


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Number and lengths of the sequences in each row."""

    sft_lengths: tuple[int, ...] = (64, 128, 192, 256, 320, 384, 440, 512)
    num_runs: int = 8
    """Each run has half as many sequences as ``sft_lengths``."""
    rl_sequences: int = 16
    rl_prompt: int = 192
    rl_completion: int = 64
    sample_prompt: int = 64
    sample_new: int = 128
    sample_many: int = 16
    """Samples of the single prompt."""
    sample_prompts: int = 32
    """Prompts with one sample each."""
    iteration_prompts: int = 8
    iteration_samples: int = 8
    iteration_new: int = 64
    iteration_long_prompt: int = 512
    group_size: int = 8
    """Sequences of an RL batch with one prompt."""
    tree_turns: int = 4
    tree_branches: int = 8
    tree_turn: int = 48
    """Tokens that each turn of a multi-turn episode adds to a prompt of ``sample_prompt``."""
    system_prompt: int = 256
    num_adapters: int = 8
    """Adapters of one batch."""
    num_new_shapes: int = 5
    memory_phases: tuple[str, ...] = ("SFT", "RL batch", "sampling")
    bases: tuple[str, ...]
    """The shapes of the row ``base``."""


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    name: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    tie_word_embeddings: bool
    row_seconds: float
    """Time budget: a row is not repeated if that would exceed it."""
    sizes: Sizes
    is_worth_compiling: bool = True
    """Whether vLLM compiles the model, which takes a minute, as it does by default."""

    def linear_shapes(self) -> list[tuple[int, int]]:
        """Return (out, in) of every linear layer, the head last."""
        hidden, inner = self.hidden_size, self.intermediate_size
        kv = hidden // self.num_attention_heads * self.num_key_value_heads
        layer = [(hidden, hidden), (kv, hidden), (kv, hidden), (hidden, hidden)]
        layer += [(inner, hidden), (inner, hidden), (hidden, inner)]
        return layer * self.num_hidden_layers + [(self.vocab_size, hidden)]

    def write(self, directory: Path, dtype: str = "float32") -> None:
        """Write the model; the weights are the same each time."""
        config = LlamaConfig(
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_hidden_layers=self.num_hidden_layers,
            num_attention_heads=self.num_attention_heads,
            num_key_value_heads=self.num_key_value_heads,
            tie_word_embeddings=self.tie_word_embeddings,
            max_position_embeddings=2048,
            pad_token_id=0,
            bos_token_id=None,
            eos_token_id=None,
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype)).save_pretrained(directory)


SMALL = ModelShape(
    name="small",
    vocab_size=16384,
    hidden_size=512,
    intermediate_size=1408,
    num_hidden_layers=12,
    num_attention_heads=8,
    num_key_value_heads=4,
    tie_word_embeddings=False,
    row_seconds=100,
    sizes=Sizes(bases=("small", "half")),
)
SMOL = ModelShape(
    name="smol",
    vocab_size=49152,
    hidden_size=576,
    intermediate_size=1536,
    num_hidden_layers=30,
    num_attention_heads=9,
    num_key_value_heads=3,
    tie_word_embeddings=True,
    row_seconds=200,
    sizes=Sizes(bases=("smol",)),
)
HALF = ModelShape(
    name="half",
    vocab_size=151936,
    hidden_size=896,
    intermediate_size=4864,
    num_hidden_layers=24,
    num_attention_heads=14,
    num_key_value_heads=2,
    tie_word_embeddings=True,
    row_seconds=400,
    sizes=Sizes(bases=("half",)),
)
"""The shape of Qwen2.5-0.5B, for the row ``base``."""
QUICK = ModelShape(
    name="quick",
    vocab_size=384,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    # vLLM knows no head smaller than 32.
    num_attention_heads=2,
    num_key_value_heads=1,
    tie_word_embeddings=True,
    row_seconds=5,
    is_worth_compiling=False,
    sizes=Sizes(
        sft_lengths=(5, 9, 14, 20),
        num_runs=2,
        rl_sequences=4,
        rl_prompt=12,
        rl_completion=4,
        sample_prompt=6,
        sample_new=4,
        sample_many=3,
        sample_prompts=4,
        iteration_prompts=2,
        iteration_samples=2,
        iteration_new=4,
        iteration_long_prompt=20,
        group_size=2,
        tree_turns=2,
        tree_branches=2,
        tree_turn=16,
        system_prompt=20,
        num_adapters=2,
        num_new_shapes=2,
        memory_phases=("SFT",),
        bases=("quick",),
    ),
)
"""A minuscule model for smoke tests; ignore its figures."""

SHAPES = {shape.name: shape for shape in (SMALL, SMOL, HALF, QUICK)}
