"""``python -m bench``: run benchmarks and print a Markdown table. Progress goes to standard error."""

import argparse
import os
import sys
import tempfile
import time
import traceback
from contextlib import closing
from pathlib import Path

import torch
import transformers

from bench.contest import Contest, open_contest
from bench.limits import MAX_SLOWDOWN, bfloat16_slowdown
from bench.models import SHAPES
from bench.profiling import profile_ours
from bench.report import describe_machine, replace_part, table
from bench.rows import OUTSIDE_ROWS, ROWS
from bench.service.rows import ROWS as SERVICE_ROWS
from bench.service.run import measure_service
from bench.simulation_report import simulate
from bench.timing import say
from lorimer.engine.config import Dtype

DOCUMENT = Path(__file__).parents[1] / "docs" / "benchmarks.md"


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("--model", choices=["small", "smol", "all"], default="all")
    parser.add_argument("--quick", action="store_true", help="smoke test with a minuscule model")
    peers_help = (
        f"install vLLM, TRL and SkyRL for {','.join(OUTSIDE_ROWS)}; write the table of all rows into {DOCUMENT.name}"
    )
    parser.add_argument("--peers", action="store_true", help=peers_help)
    parser.add_argument("--simulate", action="store_true", help="run the scheduler's core on a virtual clock instead")
    parser.add_argument("--plot", type=Path, help="with --simulate: draw throughput and step times into this file")
    parser.add_argument("--service", action="store_true", help="load-test a server instead of the engine")
    rows_help = f"some of {','.join(ROWS)}; with --service of {','.join(SERVICE_ROWS)}"
    parser.add_argument("--rows", help=rows_help)
    parser.add_argument("--threads", type=int, default=0, help="0 uses all cores available to this process")
    parser.add_argument("--repeats", type=int, default=3, help="rounds of each row, within its time budget")
    parser.add_argument("--output", type=Path, help="also write the table to this file")
    parser.add_argument("--profile", action="store_true", help="profile our SFT step and decoding instead of measuring")
    options = parser.parse_args(arguments)
    rows = list(SERVICE_ROWS if options.service else ROWS)
    default = OUTSIDE_ROWS if options.peers else rows
    options.is_published = options.peers and not options.quick and options.rows is None
    names = default if options.rows is None else options.rows.split(",")
    if unknown := [name for name in names if name not in rows]:
        parser.error(f"there is no row {unknown[0]!r}; there are {', '.join(rows)}")
    options.rows = [name for name in rows if name in names]
    return options


def choose_dtypes() -> tuple[list[Dtype], str]:
    """Return the dtypes to measure and a sentence that explains the choice."""
    slowdown = bfloat16_slowdown()
    if slowdown > MAX_SLOWDOWN:
        reason = f"its matrix products take {slowdown:.1f} times as long as those of float32 on this machine"
        return ["float32"], f"bfloat16 was skipped on both sides: {reason}."
    return ["float32", "bfloat16"], "Both sides were measured in float32 and bfloat16; the faster one counts."


def measure(contest: Contest, rows: list[str]) -> tuple[str, bool]:
    """Return the table and whether every row succeeded. A row that fails does not stop the others."""
    lines, failed = [], []
    for row in rows:
        try:
            lines += ROWS[row](contest)
        except Exception:
            traceback.print_exc()
            failed.append(row)
    text = table(lines) if lines else ""
    text += "".join(f"\n\nRow `{row}` failed." for row in failed)
    text += "".join(f"\n\nA peer computed something else: {mismatch}." for mismatch in contest.mismatches)
    return text, not failed and not contest.mismatches


def main(arguments: list[str] | None = None) -> int:
    """Run the selected benchmarks. Return 1 if one failed, else 0, whether or not targets are met."""
    options = parse(arguments)
    num_threads = options.threads or _num_cores()
    start = time.perf_counter()
    if options.simulate:
        parts, has_succeeded = [describe_machine(num_threads), simulate(num_threads, options.quick, options.plot)], True
    else:
        parts, has_succeeded = (load_service if options.service else race_engine)(options, num_threads)
    parts.append(f"Measured in {(time.perf_counter() - start) / 60:.0f} minutes.")
    print("\n\n".join(parts))
    if options.output:
        options.output.write_text("\n\n".join(parts) + "\n", "utf-8")
    if options.is_published:
        DOCUMENT.write_text(replace_part(DOCUMENT.read_text("utf-8"), "peers", "\n\n".join(parts)), "utf-8")
    return 0 if has_succeeded else 1


def load_service(options: argparse.Namespace, num_threads: int) -> tuple[list[str], bool]:
    """Return the paragraphs of the report and whether every row succeeded."""
    parts = [describe_machine(num_threads)]
    if options.quick:
        parts.append("Small loads on one server: the figures mean nothing.")
    for part in parts:
        say(part)
    text, has_succeeded = measure_service(options.rows, num_threads, options.quick)
    return [*parts, text], has_succeeded


def race_engine(options: argparse.Namespace, num_threads: int) -> tuple[list[str], bool]:
    """Return the same as ``load_service``, for the engine against its peers."""
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    torch.set_num_threads(num_threads)
    dtypes, sentence = choose_dtypes()
    parts = [describe_machine(num_threads), sentence]
    names, num_rounds = ["small", "smol"] if options.model == "all" else [options.model], options.repeats
    if options.quick:
        names, num_rounds = ["quick"], min(options.repeats, 2)
        parts.append("A minuscule model: the figures mean nothing.")
    for part in parts:
        say(part)
    has_succeeded = True
    for name in names:
        with (
            tempfile.TemporaryDirectory() as root,
            closing(
                open_contest(SHAPES[name], dtypes, Path(root), num_rounds, num_threads, say, options.peers)
            ) as contest,
        ):
            text, is_good = (profile_ours(contest), True) if options.profile else measure(contest, options.rows)
        has_succeeded &= is_good
        parts += [f"### {name}", text]
    return parts, has_succeeded


def _num_cores() -> int:
    # Not every system has sched_getaffinity.
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


if __name__ == "__main__":
    sys.exit(main())
