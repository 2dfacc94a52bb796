"""Measures the engine's sampler and a vLLM sampler side by side, behind one server that has both.

Samples with a seed go to the engine and others to vLLM; the two take turns. Without an environment that has vLLM there
is nothing to measure: ``make test-vllm`` makes one.
"""

import asyncio
import time

import msgspec
import numpy as np

from bench.environments import VLLM
from bench.service.client import Session, call, wait
from bench.service.figures import Figure, median
from bench.service.http import HttpPool
from bench.service.setting import Bench
from lorimer.models.debug import make_debug_model

MODEL = "bench/sampled"
SHAPE = {
    "vocab_size": 8192,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 1024,
}
PROMPT_TOKENS = 64
READY_SECONDS = 600.0


async def samplers(bench: Bench) -> list[Figure]:
    """Sample concurrent prompts, and several samples of one prompt, of the base model.

    vLLM computes the base as an adapter of zeros, the engine without an adapter.
    """
    python = VLLM.python()
    if bench.shared is not None or python is None:
        bench.progress("samplers: there is no environment with vLLM; make test-vllm makes one")
        return []
    sizes = bench.sizes
    model = bench.root / "sampled"
    make_debug_model(model, architecture="llama", **SHAPE)
    config = bench.root / "samplers.toml"
    config.write_text(
        f'[model."{MODEL}"]\nsource = "{model}"\nmemory_bytes = {2**30}\n'
        f'sampler = {{ kind = "vllm", python = "{python}" }}\n',
        "utf-8",
    )
    async with bench.server("samplers", MODEL, config=config) as (_, pool):
        await until_ready(pool)
        session = await Session.create(pool)
        base = await session.create_sampler(0, MODEL)
        figures: list[Figure] = []
        loads = {f"{sizes.vllm_prompts} prompts": (sizes.vllm_prompts, 1), "1 prompt, 16 samples": (1, 16)}
        for name, (num_prompts, num_samples) in loads.items():
            rates: dict[bool, list[float]] = {False: [], True: []}
            for number in range(sizes.vllm_rounds + 1):
                for is_vllm in rates:
                    start = time.perf_counter()
                    calls = (
                        submit(
                            pool, base.sampling_session_id, next(base.numbers), num_samples, sizes.vllm_tokens, is_vllm
                        )
                        for _ in range(num_prompts)
                    )
                    await asyncio.gather(*calls)
                    if number:  # the first round warms up
                        seconds = time.perf_counter() - start
                        rates[is_vllm].append(num_prompts * num_samples * sizes.vllm_tokens / seconds)
            bench.progress(f"samplers: {name}: engine {median(rates[False]):.0f}, vLLM {median(rates[True]):.0f}")
            details = f"engine {median(rates[False]):.0f} tokens/s, vLLM {median(rates[True]):.0f} tokens/s"
            text = f"Sampling with vLLM ÷ with the engine, {name}, {sizes.vllm_tokens} tokens each, 34 M parameters"
            figures.append(Figure(text=text, value=median(rates[True]) / median(rates[False]), details=details))
        return figures


async def submit(
    pool: HttpPool, sampling_session_id: str, number: int, num_samples: int, num_tokens: int, is_vllm: bool
) -> None:
    """Sample one prompt, different from all others, and wait for the result."""
    prompt = np.random.default_rng(number).integers(3, SHAPE["vocab_size"], PROMPT_TOKENS).tolist()
    body = {
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": prompt}]},
        "num_samples": num_samples,
        "sampling_params": {"max_tokens": num_tokens, "stop": []} | ({} if is_vllm else {"seed": number}),
        "sampling_session_id": sampling_session_id,
        "seq_id": number,
    }
    await wait(pool, (await call(pool, "asample", body)).json()["request_id"])


async def until_ready(pool: HttpPool) -> None:
    deadline = time.monotonic() + READY_SECONDS
    while True:
        found = msgspec.json.decode((await pool.get("/api/v1/replicas")).body)["replicas"]
        if all(replica["state"] == "ready" for replica in found):
            return
        if time.monotonic() > deadline:
            raise TimeoutError(f"vLLM is not ready: {found}")
        await asyncio.sleep(0.5)
