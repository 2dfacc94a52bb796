"""``python -m bench``: measure, and print a Markdown table. Progress goes to standard error."""

import argparse
import os
import sys
import tempfile
import time
import traceback
from pathlib import Path

import torch
import transformers

from bench.contest import Contest, open_contest
from bench.limits import MOST_SLOWDOWN, bfloat16_slowdown
from bench.models import SHAPES
from bench.profiling import profile_ours
from bench.report import describe_machine, table
from bench.rows import ROWS
from bench.timing import say
from lorimer.engine.config import Dtype


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("--model", choices=["small", "smol", "all"], default="all")
    parser.add_argument("--quick", action="store_true", help="a minuscule model: shows that everything runs, no more")
    parser.add_argument("--rows", type=_row_names, default=list(ROWS), help=f"some of {','.join(ROWS)}")
    parser.add_argument("--threads", type=int, default=0, help="0 takes all cores this process may use")
    parser.add_argument("--repeats", type=int, default=3, help="rounds of each row, where its time allows")
    parser.add_argument("--output", type=Path, help="a file that gets the table too")
    parser.add_argument("--profile", action="store_true", help="profile our SFT step and decoding instead of measuring")
    return parser.parse_args(arguments)


def _row_names(text: str) -> list[str]:
    names = text.split(",")
    if unknown := [name for name in names if name not in ROWS]:
        raise argparse.ArgumentTypeError(f"there is no row {unknown[0]!r}; there are {', '.join(ROWS)}")
    return [name for name in ROWS if name in names]


def choose_dtypes() -> tuple[list[Dtype], str]:
    """The dtypes worth measuring, and a sentence about it."""
    slowdown = bfloat16_slowdown()
    if slowdown > MOST_SLOWDOWN:
        reason = f"its matrix products take {slowdown:.1f} times as long as those of float32 on this machine"
        return ["float32"], f"bfloat16 was skipped on both sides: {reason}."
    return ["float32", "bfloat16"], "Both sides were measured in float32 and bfloat16; the faster one counts."


def measure(contest: Contest, rows: list[str]) -> tuple[str, bool]:
    """The table, and whether every row succeeded; one that fails does not take the others with it."""
    lines, failed = [], []
    for row in rows:
        try:
            lines += ROWS[row](contest)
        except Exception:
            traceback.print_exc()
            failed.append(row)
    text = table(lines) if lines else ""
    return text + "".join(f"\n\nRow `{row}` failed." for row in failed), not failed


def main(arguments: list[str] | None = None) -> int:
    """Measure what the arguments ask for; 1 when something failed, 0 else, whether or not aims are met."""
    options = parse(arguments)
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    num_threads = options.threads or _num_cores()
    torch.set_num_threads(num_threads)
    dtypes, sentence = choose_dtypes()
    parts = [describe_machine(num_threads), sentence]
    names, num_rounds = ["small", "smol"] if options.model == "all" else [options.model], options.repeats
    if options.quick:
        names, num_rounds = ["quick"], min(options.repeats, 2)
        parts.append("A minuscule model: the figures mean nothing.")
    for part in parts:
        say(part)
    start, has_succeeded = time.perf_counter(), True
    for name in names:
        with tempfile.TemporaryDirectory() as root:
            contest = open_contest(SHAPES[name], dtypes, Path(root), num_rounds, num_threads, say)
            text, is_good = (profile_ours(contest), True) if options.profile else measure(contest, options.rows)
        has_succeeded &= is_good
        parts += [f"### {name}", text]
    parts.append(f"Measured in {(time.perf_counter() - start) / 60:.0f} minutes.")
    print("\n\n".join(parts))
    if options.output:
        options.output.write_text("\n\n".join(parts) + "\n", "utf-8")
    return 0 if has_succeeded else 1


def _num_cores() -> int:
    # Not every system can say which cores a process may use.
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


if __name__ == "__main__":
    sys.exit(main())
