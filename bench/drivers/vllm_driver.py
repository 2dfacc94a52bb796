"""Samples with vLLM, offline and in batches: ``python -m bench.drivers.vllm_driver`` in an environment that has it."""

from typing import Any

from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest

from bench.drivers.lines import serve

KV_CACHE_BYTES = 1 << 30


class Vllm:
    """One engine; with ``adapters``, each request has one of them."""

    def __init__(
        self, model: str, adapters: list[str], dtype: str, num_threads: int, rank: int, is_compiled: bool
    ) -> None:
        lora = {
            "enable_lora": True,
            "max_loras": len(adapters),
            "max_cpu_loras": len(adapters),
            "max_lora_rank": rank,
        }
        self._engine = LLM(
            model=model,
            dtype=dtype,
            enforce_eager=not is_compiled,
            skip_tokenizer_init=True,
            generation_config="vllm",
            kv_cache_memory_bytes=KV_CACHE_BYTES,
            **(lora if adapters else {}),
        )
        self._adapters = [LoRARequest(str(i), i + 1, path) for i, path in enumerate(adapters)]

    def sample(
        self, prompts: list[list[int]], num_samples: int, num_new: int, adapters: list[int] | None
    ) -> list[list[tuple[list[int], list[float]]]]:
        """Return the tokens and logprobs of the samples of each prompt; ``adapters`` has the adapter of each."""
        params = SamplingParams(
            n=num_samples, temperature=1.0, max_tokens=num_new, ignore_eos=True, logprobs=0, detokenize=False
        )
        requests: list[Any] | None = None if adapters is None else [self._adapters[number] for number in adapters]
        asked: list[Any] = [{"prompt_token_ids": prompt} for prompt in prompts]
        answers = self._engine.generate(asked, params, lora_request=requests, use_tqdm=False)
        return [[_sample_of(sample) for sample in answer.outputs] for answer in answers]


def _sample_of(sample: Any) -> tuple[list[int], list[float]]:
    tokens = list(sample.token_ids)
    return tokens, [found[token].logprob for token, found in zip(tokens, sample.logprobs, strict=True)]


if __name__ == "__main__":
    serve(Vllm)
