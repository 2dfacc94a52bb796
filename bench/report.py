"""Defines the targets and writes the table that shows which are met."""

import os
import platform
import time
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from bench.timing import Timing


@dataclass(frozen=True)
class Aim:
    bound: float
    is_minimum: bool = True
    """Whether ``bound`` is a minimum rather than a maximum."""

    def __str__(self) -> str:
        return f"{'≥' if self.is_minimum else '≤'} {self.bound:g}"

    def is_met(self, ratio: float) -> bool:
        return ratio >= self.bound if self.is_minimum else ratio <= self.bound


AIMS = {
    "sft": Aim(1.3),
    "sft padded": Aim(2.1),
    "limit float32": Aim(0.72),
    "limit bfloat16": Aim(0.50),
    "runs": Aim(0.95),
    "rl_batch": Aim(1.0),
    "prefix_groups": Aim(2.3),
    "prefix_groups loop": Aim(2.0),
    "sample_1x16": Aim(3.5),
    "sample_32x1": Aim(4.0),
    "sample vLLM": Aim(1.25),
    "adapter cost": Aim(1.25, is_minimum=False),
    "several adapters": Aim(1.2, is_minimum=False),
    "full": Aim(1.2),
    "full memory": Aim(1.0),
    "first_call": Aim(1.2, is_minimum=False),
    "base": Aim(1.25, is_minimum=False),
    "base peak": Aim(1.3, is_minimum=False),
}
"""Targets by `Line.aim`; ratios, so that they hold on any machine. Lines without an entry have no target."""


@dataclass(frozen=True, kw_only=True)
class Line:
    """One comparison. The row's text defines the ratio: a speed-up, a fraction or a cost."""

    text: str
    ours: str
    other: str
    which: str
    """Name of the other side."""
    ratio: float | None
    """None if the other side has no figure."""
    aim: str = ""
    """The entry of ``AIMS`` that applies."""

    def cells(self) -> list[str]:
        aim = AIMS.get(self.aim)
        if self.ratio is None:
            return [self.text, self.ours, self.other, self.which, "-", "-", "-"]
        verdict = ["-", "-"] if aim is None else [str(aim), "yes" if aim.is_met(self.ratio) else "**no**"]
        return [self.text, self.ours, self.other, self.which, f"{self.ratio:.2f}", *verdict]


def compare(text: str, ours: Timing, other: Timing, count: int, aim: str = "") -> Line:
    """Return the line of two sides that compute ``count`` tokens; the ratio is that of their speeds."""
    return Line(
        text=text,
        ours=ours.rate(count),
        other=other.rate(count),
        which=other.name,
        ratio=other.median / ours.median,
        aim=aim,
    )


HEADER = ["row", "ours", "other", "which other", "ratio", "aim", "met"]


def table(lines: list[Line]) -> str:
    rows = [HEADER, ["---"] * len(HEADER), *(line.cells() for line in lines)]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def replace_part(document: str, name: str, part: str) -> str:
    """Return a document with what is between its two comments of that name replaced."""
    begin, end = f"<!-- begin {name} -->", f"<!-- end {name} -->"
    before, _, rest = document.partition(begin)
    _, found, after = rest.partition(end)
    if not found:
        raise ValueError(f"the document has no {begin!r} before {end!r}")
    return f"{before}{begin}\n\n{part}\n\n{end}{after}"


def describe_machine(num_threads: int) -> str:
    """Return what a reader needs to judge the figures: machine, threads, load and versions."""
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers", "peft"))
    load = f"{os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else "unknown"
    return (
        f"{time.strftime('%Y-%m-%d %H:%M')}, {_cpu_name()}, {os.cpu_count()} cores, {num_threads} threads,"
        f" load at start {load}; Python {platform.python_version()}, {versions}."
    )


INSTRUCTIONS = {
    "avx2": "AVX2",
    "avx512f": "AVX-512",
    "avx512_bf16": "AVX-512 bf16",
    "amx_bf16": "AMX bf16",
    "asimd": "NEON",
    "sve": "SVE",
    "bf16": "bf16",
}
"""Instruction sets that decide the speed of matrix products, by their names in Linux."""


def _cpu_name() -> str:
    """Return the name of the processor and those of its instruction sets that matter."""
    cpu = _cpu_info()
    name = cpu.get("model name") or platform.processor() or platform.machine()
    flags = (cpu.get("flags") or cpu.get("Features") or "").split()
    sets = ", ".join(text for flag, text in INSTRUCTIONS.items() if flag in flags)
    return f"{name} ({sets})" if sets else name


def _cpu_info() -> dict[str, str]:
    """Return what Linux says of the first processor; nothing elsewhere."""
    info = Path("/proc/cpuinfo")
    if not info.exists():
        return {}
    first, _, _ = info.read_text("utf-8").partition("\n\n")
    lines = (line.partition(":") for line in first.splitlines())
    return {name.strip(): value.strip() for name, _, value in lines}
