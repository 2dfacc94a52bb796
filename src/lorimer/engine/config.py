"""The settings of one engine process; it is sent to the worker as its first message. Does not import torch."""

from typing import Literal, get_args

import msgspec

Dtype = Literal["auto", "float32", "bfloat16"]
Device = Literal["auto", "cpu", "cuda", "mps"]


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    model: str = "lorimer/tiny"
    """A local directory, a .gguf file, an alias or a hub id."""
    device: Device = "auto"
    device_index: int = 0
    """Which of several GPUs; engines beyond their number share them."""
    dtype: Dtype = "auto"
    """Dtype of the frozen base; adapters, gradients and optimisers are always float32."""
    num_threads: int = 0
    """CPU threads; 0 takes all cores this process may use."""
    memory_bytes: int = 0
    """Memory that the engine may use besides the base weights; 0 takes 70 % of what is free at start."""
    max_context: int = 0
    """Longest sequence; 0 takes the model's own limit."""
    token_budget: int = 0
    """Maximum tokens of one packed training pass; 0 computes it from memory."""
    max_sampling_rows: int = 256
    """Maximum sequences decoded in one step."""
    max_image_pixels: int = 2**24
    """Maximum pixels of an image; a larger one is refused before it is decoded."""
    ranks: int = 1
    """Processes that share the base model: each has its part of the weights and computes its part of every batch."""
    cache_directory: str = ""
    """Where converted and downloaded models are kept; empty takes the user's cache directory."""
    seed: int | None = None
    """Makes runs and samples without a seed of their own repeatable; for tests."""

    def __post_init__(self) -> None:
        for name in ("device_index", "num_threads", "memory_bytes", "max_context", "token_budget"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name)!r}; a number of at least 0 is accepted")
        for name, kind in (("device", Device), ("dtype", Dtype)):
            if getattr(self, name) not in get_args(kind):
                raise ValueError(f"{name} is {getattr(self, name)!r}; {', '.join(get_args(kind))} are accepted")
        for name in ("max_sampling_rows", "max_image_pixels", "ranks"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)!r}; at least 1 is accepted")
        if not self.model:
            raise ValueError("model is empty; name a directory, a .gguf file, an alias or a hub id")
