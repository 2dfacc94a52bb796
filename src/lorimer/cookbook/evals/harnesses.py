"""Tasks of other packages: runs the installed ``inspect-ai`` or ``lm-eval`` against a server's OpenAI routes.

Both write what each item got, and that is stored like the grades of our own tasks. A score that is not a number for
each item, such as a perplexity over a corpus, is refused by name.
"""

import importlib.util
import json
import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from lorimer.cookbook.evals.running import Measured
from lorimer.errors import InvalidInput, LorimerError

Package = Literal["inspect", "lm-eval"]
MODULES: dict[Package, tuple[str, str]] = {
    "inspect": ("inspect_ai", "pip install inspect-ai openai"),
    "lm-eval": ("lm_eval", 'pip install "lm-eval[api]"'),
}
INSPECT_VALUES = {"C": 1.0, "P": 0.5, "I": 0.0, "N": 0.0}
"""Correct, partially correct, incorrect, no answer: as inspect counts them."""
LAST_LINES = 5


@dataclass(frozen=True, kw_only=True)
class HarnessRun:
    """What a package is asked to do."""

    tasks: Sequence[str]
    model: str
    base_url: str
    """Of the server, without ``/v1``."""
    api_key: str
    log_dir: Path
    max_tokens: int | None = None
    temperature: float = 0.0
    limit: int | None = None
    seed: int = 0
    num_samples: int = 1
    concurrency: int = 8
    tokenizer: str | None = None
    """With it lm-eval asks for likelihoods, through completions; without it for replies, through chat."""
    arguments: Sequence[str] = field(default_factory=tuple)
    """More arguments of the package's own command."""

    def settings(self, **more: Any) -> dict[str, Any]:
        given = {"temperature": self.temperature, "max_tokens": self.max_tokens, "arguments": list(self.arguments)}
        return {name: value for name, value in (given | more).items() if value not in (None, [])}


def check_installed(package: Package) -> None:
    """Refuse a package that is missing, with the command that installs it."""
    module, command = MODULES[package]
    if importlib.util.find_spec(module) is None:
        raise InvalidInput(f"--with {package} needs the package {module}, which is not installed: {command}")


def run_harness(package: Package, run: HarnessRun) -> list[Measured]:
    """Run the package to its end and return the grades of each score of each task."""
    check_installed(package)
    if package == "lm-eval" and run.num_samples != 1:
        raise InvalidInput("lm-eval decides itself how often it samples; --samples is accepted with inspect")
    run.log_dir.mkdir(parents=True, exist_ok=True)
    command, variables = (_inspect_command if package == "inspect" else _lm_eval_command)(run)
    ended = subprocess.run(
        [sys.executable, "-m", *command],
        env=os.environ | variables,
        stdout=sys.stderr,
        stderr=subprocess.PIPE,
        text=True,
    )
    if ended.returncode:
        said = " / ".join(ended.stderr.strip().splitlines()[-LAST_LINES:])
        raise LorimerError(f"{package} ended with {ended.returncode}: {said or 'it said nothing'}")
    found = list((read_inspect_logs if package == "inspect" else read_lm_eval_samples)(run))
    if not found:
        raise LorimerError(f"{package} wrote no grades of items to {str(run.log_dir)!r}")
    return found


# ── inspect-ai ────────────────────────────────────────────────────────────────────────────────────────


def _inspect_command(run: HarnessRun) -> tuple[list[str], dict[str, str]]:
    options = {
        "--model": f"openai-api/local/{run.model}",
        "--log-dir": str(run.log_dir),
        "--log-format": "json",
        "--display": "none",
        "--temperature": run.temperature,
        "--seed": run.seed,
        "--epochs": run.num_samples,
        "--max-connections": run.concurrency,
        "--max-tokens": run.max_tokens,
        "--limit": run.limit,
    }
    words = [word for name, value in options.items() if value is not None for word in (name, str(value))]
    variables = {"LOCAL_BASE_URL": f"{run.base_url}/v1", "LOCAL_API_KEY": run.api_key}
    return ["inspect_ai", "eval", *run.tasks, *words, *run.arguments], variables


def read_inspect_logs(run: HarnessRun) -> Iterator[Measured]:
    """Yield the grades of each scorer of each log."""
    for path in sorted(run.log_dir.glob("*.json")):
        log = json.loads(path.read_text("utf-8"))
        if log.get("status") != "success":
            error = (log.get("error") or {}).get("message", "it says nothing more")
            raise LorimerError(f"the task {log['eval']['task']!r} ended with {log.get('status')!r}: {error}")
        task = str(log["eval"]["task"]).rpartition("/")[2]
        grades: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
        for sample in log.get("samples") or []:
            for scorer, score in (sample.get("scores") or {}).items():
                for name, value in _named_values(scorer, score["value"]):
                    grades[name][str(sample["id"])].append(_inspect_grade(task, name, value))
        settings = run.settings(epochs=run.num_samples, limit=run.limit)
        yield from (_measured(task, name, settings, found) for name, found in grades.items())


def _named_values(scorer: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the values of a score; a scorer with several gives each of them a name."""
    if isinstance(value, dict):
        yield from ((f"{scorer}/{name}", each) for name, each in value.items())
    else:
        yield scorer, value


def _inspect_grade(task: str, name: str, value: Any) -> float:
    if isinstance(value, str) and value in INSPECT_VALUES:
        return INSPECT_VALUES[value]
    try:
        return float(value)
    except (TypeError, ValueError):
        raise InvalidInput(
            f"the score {name!r} of {task!r} is {value!r}, which is not a number; numbers are stored"
        ) from None


# ── lm-evaluation-harness ─────────────────────────────────────────────────────────────────────────────


def _lm_eval_command(run: HarnessRun) -> tuple[list[str], dict[str, str]]:
    kind = "local-chat-completions" if run.tokenizer is None else "local-completions"
    route = "chat/completions" if run.tokenizer is None else "completions"
    given = {
        "model": run.model,
        "base_url": f"{run.base_url}/v1/{route}",
        "num_concurrent": run.concurrency,
        "tokenizer": run.tokenizer,
    }
    model_args = ",".join(f"{name}={value}" for name, value in given.items() if value is not None)
    words = ["--model", kind, "--model_args", model_args, "--tasks", ",".join(run.tasks)]
    words += ["--output_path", str(run.log_dir), "--log_samples", "--seed", str(run.seed)]
    if run.tokenizer is None:
        generated = [f"temperature={run.temperature:g}"]
        generated += [f"max_gen_toks={run.max_tokens}"] if run.max_tokens else []
        words += ["--apply_chat_template", "--gen_kwargs", ",".join(generated)]
    if run.limit is not None:
        words += ["--limit", str(run.limit)]
    return ["lm_eval", "run", *words, *run.arguments], {"OPENAI_API_KEY": run.api_key}


def read_lm_eval_samples(run: HarnessRun) -> Iterator[Measured]:
    """Yield the grades of each metric of each task and filter."""
    kind = {"limit": run.limit, "likelihood": run.tokenizer is not None or None}
    for path in sorted(run.log_dir.rglob("samples_*.jsonl")):
        task = path.stem.removeprefix("samples_").rpartition("_")[0]
        grades: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
        for line in path.read_text("utf-8").splitlines():
            sample = json.loads(line)
            item = f"{sample['doc_id']}-{str(sample.get('doc_hash', ''))[:12]}"
            for metric in sample["metrics"]:
                name = metric if sample.get("filter", "none") == "none" else f"{metric},{sample['filter']}"
                if not isinstance(sample[metric], int | float):
                    raise InvalidInput(
                        f"the metric {metric!r} of {task!r} is {sample[metric]!r} for an item, which is not a number; "
                        "metrics that are means over items are stored"
                    )
                grades[name][item].append(float(sample[metric]))
        yield from (_measured(task, name, run.settings(**kind), found) for name, found in grades.items())


def _measured(task: str, metric: str, settings: Mapping[str, Any], grades: Mapping[str, list[float]]) -> Measured:
    counts = {len(found) for found in grades.values()}
    if len(counts) != 1:
        raise InvalidInput(f"items of {task!r} have {sorted(counts)} grades; the same number of each is stored")
    return Measured(task, metric, settings, list(grades), list(grades.values()))
