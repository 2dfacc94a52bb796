"""``python -m bench.quantization MODEL TEXT``: memory, speed and quality of a base in each format, as a Markdown table.

Each format has a process of its own. TEXT has a document in each line, plain or as JSON, whose strings are joined; the
model's loss on them is compared. Speed is in tokens per second of CPU time of one thread, best of several rounds, so
that other programs of the machine disturb it little.
"""

import argparse
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from lorimer.engine import messages
from lorimer.engine.config import EngineConfig, Quantize
from lorimer.engine.engine import Engine

KINDS: tuple[Quantize, ...] = ("none", "int8", "int4", "nf4")
ROWS = (1, 8, 32)
TRAIN_TOKENS, SAMPLE_TOKENS, PROMPT_TOKENS = 512, 12, 16
MAX_DOCUMENT_TOKENS = 1024


def anonymous_bytes() -> int:
    """Return the memory of this process without the pages of mapped files, which the system can drop."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines["RssAnon"].split()[0]) * 1024


class Peak(threading.Thread):
    """Measures the highest memory of this process until it is stopped."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.before = self.highest = anonymous_bytes()
        self._is_over = threading.Event()

    def run(self) -> None:
        while not self._is_over.wait(0.002):
            self.highest = max(self.highest, anonymous_bytes())

    def stop(self) -> None:
        self._is_over.set()
        self.join()


def measure(model: str, kind: Quantize, text: Path, num_rounds: int, max_documents: int) -> dict[str, Any]:
    """Measure one format in this process."""
    peak = Peak()
    peak.start()
    config = EngineConfig(
        model=model, quantize=kind, dtype="float32", device="cpu", num_threads=1, memory_bytes=1 << 30, seed=0
    )
    engine = Engine(config)
    peak.stop()
    found: dict[str, Any] = {
        "kind": kind,
        "parameters": engine.info.num_parameters,
        "resident": anonymous_bytes() - peak.before,
        "peak": peak.highest - peak.before,
    }
    lora = messages.LoraConfig(rank=32, seed=1)
    engine.create_run(messages.CreateRun(request_id="c", model_id="run", lora=lora))
    found["nll"], found["tokens"] = loss(engine, documents(engine, text, max_documents))
    datum = datum_of(np.arange(TRAIN_TOKENS // 4 + 1) * 7 % engine.info.vocab_size)
    found["train"] = best_rate(lambda: train(engine, [datum] * 4), num_rounds)
    for rows in ROWS:
        found[f"sample {rows}"] = best_rate(lambda rows=rows: sample(engine, rows), num_rounds)  # type: ignore[misc]
    return found


def documents(engine: Engine, text: Path, max_documents: int) -> list[messages.Datum]:
    found = []
    for line in text.read_text("utf-8").splitlines()[:max_documents]:
        value = json.loads(line) if line.startswith("{") else {"text": line}
        joined = "\n".join(part for part in value.values() if isinstance(part, str))
        tokens = engine.tokenizer.encode(joined)
        first = engine.tokenizer.bos_token_id
        if first is not None and tokens[:1] != [first]:
            tokens = [first, *tokens]  # some models predict nothing without it
        if len(tokens) > 1:
            found.append(datum_of(np.array(tokens[:MAX_DOCUMENT_TOKENS])))
    return found


def datum_of(tokens: np.ndarray) -> messages.Datum:
    inputs = {"target_tokens": tokens[1:], "weights": np.ones(len(tokens) - 1, np.float32)}
    return messages.Datum(tokens=tokens[:-1], loss_fn_inputs=inputs)


def loss(engine: Engine, data: list[messages.Datum]) -> tuple[float, int]:
    """Return the mean negative logprob of a token, and the number of tokens; the adapter is still zero."""
    logprobs = np.concatenate(operate(engine, data, forward_only=True).logprobs)
    return float(-logprobs.mean()), len(logprobs)


def operate(engine: Engine, data: list[messages.Datum], *, forward_only: bool) -> messages.TrainResult:
    operation = messages.ForwardBackward(
        request_id="f", model_id="run", data=data, loss_fn="cross_entropy", forward_only=forward_only
    )
    (result,) = engine.train([operation])
    if isinstance(result, Exception):
        raise result
    return result


def train(engine: Engine, data: list[messages.Datum]) -> int:
    operate(engine, data, forward_only=False)
    return TRAIN_TOKENS


def sample(engine: Engine, rows: int) -> int:
    """Sample the base without a long prompt; return the number of tokens."""
    params = messages.SamplingParams(max_tokens=SAMPLE_TOKENS, temperature=1.0, stop=[], seed=0)
    prompt = np.arange(PROMPT_TOKENS) * 5 % engine.info.vocab_size
    engine.add_sample(messages.SampleRequest(request_id="s", prompt=prompt, num_samples=rows, params=params))
    while not any(isinstance(reply, messages.Done) for reply in engine.sampler.step()):
        pass
    return rows * SAMPLE_TOKENS


def best_rate(work: Callable[[], int], num_rounds: int) -> float:
    """Return tokens per second of CPU time, in the best round after the first."""
    work()
    best = 0.0
    for _ in range(num_rounds):
        start = time.process_time()
        tokens = work()
        best = max(best, tokens / (time.process_time() - start))
    return best


def table(found: list[dict[str, Any]]) -> str:
    """Return the figures as Markdown, speeds relative to float32."""
    base = found[0]
    columns = ["train", *(f"sample {rows}" for rows in ROWS)]
    heads = ["weights", "memory, MB", "peak of loading, MB", "nll", *columns]
    lines = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    for one in found:
        name = "float32" if one["kind"] == "none" else one["kind"]
        speeds = [f"{one[column]:.0f} ({one[column] / base[column]:.2f})" for column in columns]
        sizes = [f"{one[size] / 1e6:.0f}" for size in ("resident", "peak")]
        nll = f"{one['nll']:.4f} ({one['nll'] - base['nll']:+.4f})"
        lines.append(f"| {' | '.join([name, *sizes, nll, *speeds])} |")
    return "\n".join(lines) + f"\n\n{base['parameters']:,} parameters; nll over {base['tokens']:,} tokens\n"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.quantization", description=__doc__)
    parser.add_argument("model")
    parser.add_argument("text", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--documents", type=int, default=100)
    parser.add_argument("--kind", choices=KINDS, help="measure one format in this process, and print JSON")
    options = parser.parse_args(arguments)
    rest = [options.model, options.text, "--rounds", options.rounds, "--documents", options.documents]
    if options.kind:
        found = measure(options.model, options.kind, options.text, options.rounds, options.documents)
        sys.stdout.write(json.dumps(found) + "\n")
        return
    results = []
    for kind in KINDS:
        command = [sys.executable, "-m", "bench.quantization", *map(str, rest), "--kind", kind]
        answer = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
        results.append(json.loads(answer.splitlines()[-1]))
        sys.stderr.write(answer.splitlines()[-1] + "\n")
    sys.stdout.write(table(results))


if __name__ == "__main__":
    main()
