"""The settings of one engine process; it is sent to the worker as its first message. Does not import torch."""

import re
from typing import Literal, get_args

import msgspec

Dtype = Literal["auto", "float32", "bfloat16"]
Device = Literal["auto", "cpu", "cuda", "mps"]
Method = Literal["lora", "full"]
Quantize = Literal["none", "int8", "int4", "nf4"]
MAX_LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Values of ``max_lora_rank`` that vLLM has kernels for."""
_QUANTIZED = re.compile(r"(?P<model>.*?)\s*,\s*quantize\s*=\s*(?P<kind>[^,]*)", re.DOTALL)
TEMPERATURES = (0.01, 2.0)
"""Lowest and highest temperature, besides 0, that vLLM has: it raises lower ones and refuses higher ones."""


class VllmConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``sampler = { kind = "vllm", ... }`` of a base model: vLLM servers that sample beside its engines."""

    kind: Literal["vllm"] = "vllm"
    replicas: int = 1
    """Number of vLLM servers."""
    max_loras: int = 8
    """Most adapters that one server holds, and computes in one batch, besides the base."""
    max_lora_rank: int = 32
    """Highest rank of an adapter that it takes; samples of a higher rank are computed by the engine."""
    tensor_parallel: int = 1
    """Devices of one server."""
    ignore_seeds: bool = False
    """Let vLLM also sample for clients that chose a seed, which it does not use; otherwise the engine does."""
    python: str = ""
    """Python interpreter of the environment that has vLLM; empty takes that of Lorimer."""
    arguments: list[str] = []
    """Further command-line arguments of vLLM's server."""

    def __post_init__(self) -> None:
        for name in ("replicas", "max_loras", "tensor_parallel"):
            if getattr(self, name) < 1:
                raise ValueError(f"sampler.{name} is {getattr(self, name)!r}; at least 1 is accepted")
        if self.max_lora_rank not in MAX_LORA_RANKS:
            accepted = ", ".join(map(str, MAX_LORA_RANKS))
            raise ValueError(f"sampler.max_lora_rank is {self.max_lora_rank!r}; {accepted} are accepted")


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    model: str = "lorimer/tiny"
    """A local directory, a .gguf file, an alias or a hub id."""
    device: Device = "auto"
    device_index: int = 0
    """Which of several GPUs; engines beyond their number share them."""
    dtype: Dtype = "auto"
    """Dtype of passes and of the frozen base; adapters, weights of full runs, gradients and optimisers are float32."""
    quantize: Quantize = "none"
    """Format in which the projections of the frozen base are kept; passes compute in ``dtype``."""
    method: Method = "lora"
    """``full``: the engine holds one run at a time, which trains the weights of the model itself."""
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
    vllm: VllmConfig | None = None
    """With it, the process is a sampler by vLLM instead of an engine."""

    @property
    def num_devices(self) -> int:
        return self.ranks if self.vllm is None else self.vllm.tensor_parallel

    def __post_init__(self) -> None:
        for name in ("device_index", "num_threads", "memory_bytes", "max_context", "token_budget"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name)!r}; a number of at least 0 is accepted")
        for name, kind in (("device", Device), ("dtype", Dtype), ("quantize", Quantize), ("method", Method)):
            if getattr(self, name) not in get_args(kind):
                raise ValueError(f"{name} is {getattr(self, name)!r}; {', '.join(get_args(kind))} are accepted")
        for name in ("max_sampling_rows", "max_image_pixels", "ranks"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)!r}; at least 1 is accepted")
        if self.method == "full" and self.vllm is not None:
            raise ValueError("method is 'full' with a sampler of vLLM, which samples adapters: 'lora' is accepted")
        if self.quantize != "none":
            self._check_quantized()
        if not self.model:
            raise ValueError("model is empty; name a directory, a .gguf file, an alias or a hub id")

    def _check_quantized(self) -> None:
        refused = {
            f"ranks is {self.ranks}": self.ranks > 1,
            "sampler is 'vllm'": self.vllm is not None,
            "method is 'full'": self.method == "full",
        }
        for what, is_set in refused.items():
            if is_set:
                raise ValueError(
                    f"{what} with quantize {self.quantize!r}; a quantised base is trained and sampled by one engine"
                    " process, which trains adapters: 'none' is accepted"
                )


def split_quantize(text: str) -> tuple[str, str]:
    """Split ``MODEL,quantize=FORMAT`` into model and format, which ``EngineConfig`` checks; ``none`` without."""
    found = _QUANTIZED.fullmatch(text)
    return (found["model"], found["kind"].strip()) if found else (text, "none")
