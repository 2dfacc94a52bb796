"""What ``lorimer doctor`` asks the machine: Python, packages, torch, GPU and memory."""

import json
import platform
import re
import shutil
import subprocess
import sys
from importlib import metadata
from typing import Any

from lorimer.cli.findings import Finding, failed, ok, warning

PROBE_SECONDS = 90.0
MIN_MEMORY = 2 << 30
KEY_PACKAGES = ("transformers", "safetensors", "tokenizers", "huggingface-hub", "starlette", "sqlalchemy", "tinker")


def check_python() -> list[Finding]:
    version = platform.python_version()
    text = f"{version} at {sys.executable} on {platform.system()} {platform.machine()}"
    if sys.platform == "win32":
        return [warning("python", text, "servers and engines are tested on Linux; use WSL")]
    return [ok("python", text)]


def check_packages() -> list[Finding]:
    """The packages that `lorimer[server]` names, against what is installed."""
    missing, wrong = [], []
    for name, wanted in server_requirements().items():
        try:
            found = metadata.version(name)
        except metadata.PackageNotFoundError:
            missing.append(name)
            continue
        if not satisfies(found, wanted):
            wrong.append(f"{name} {found} (needed is {wanted})")
    findings = []
    if missing:
        text = f"not installed: {', '.join(missing)}"
        advice = "pip install 'lorimer[server]'; without it only the SDK and commands on other servers work"
        findings.append(warning("packages", text, advice))
    if wrong:
        findings.append(failed("packages", "; ".join(wrong), "pip install --upgrade 'lorimer[server]'"))
    return findings or [ok("packages", ", ".join(installed()))]


def server_requirements() -> dict[str, str]:
    """What this installation says it needs to serve: names and versions."""
    found = {}
    for text in metadata.requires("lorimer") or []:
        requirement, _, marker = text.partition(";")
        if not marker or re.search(r"extra == ['\"]server['\"]", marker):
            name = re.match(r"[\w.-]+", requirement)
            assert name is not None, text
            found[name[0]] = requirement[name.end() :].strip()
    return found


def satisfies(version: str, wanted: str) -> bool:
    try:
        from packaging.specifiers import SpecifierSet
    except ImportError:
        return True  # it comes with the packages of the server, whose absence is what matters then
    return SpecifierSet(wanted).contains(version, prereleases=True)


def installed() -> list[str]:
    found = []
    for name in KEY_PACKAGES:
        try:
            found.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            continue
    return found


def check_torch() -> list[Finding]:
    """What torch does in a process of its own: versions, the speed of both dtypes, GPUs and memory."""
    command = [sys.executable, "-m", "lorimer.engine.probe"]
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=PROBE_SECONDS, stdin=subprocess.DEVNULL)
    except subprocess.TimeoutExpired:
        text = f"did not finish a short computation within {PROBE_SECONDS:g} seconds"
        return [failed("torch", text, "set OMP_NUM_THREADS to the cores that are free, or reinstall torch")]
    if run.returncode:
        lines = run.stderr.strip().splitlines() or [f"ended with code {run.returncode}"]
        is_absent = "No module named" in lines[-1]
        advice = (
            "pip install 'lorimer[server]'" if is_absent else "reinstall torch: pip install --force-reinstall torch"
        )
        return [(warning if is_absent else failed)("torch", lines[-1], advice)]
    found = json.loads(run.stdout.strip().splitlines()[-1])
    return [torch_finding(found), gpu_finding(found), memory_finding(found)]


def check_device(model: str) -> list[Finding]:
    """Compare what the engine computes on its device with this machine's CPU, in a process of its own."""
    command = [sys.executable, "-m", "lorimer.engine.self_test", model]
    run = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if run.returncode:
        lines = run.stderr.strip().splitlines() or [f"ended with code {run.returncode}"]
        return [failed("device", lines[-1], "send us the whole report; serve with `--device cpu` meanwhile")]
    found = json.loads(run.stdout.strip().splitlines()[-1])
    weights = "" if found["quantize"] == "none" else f" with {found['quantize']} weights"
    text = (
        f"{found['model']} on {found['device']} ({found['name'] or 'no name'}), {found['dtype']}{weights}, torch"
        f" {found['torch']}: token budget {found['token_budget']:,}, trains {found['train_tokens_per_second']:,.0f}"
        " and samples"
        f" {found['sample_tokens_per_second']:,.0f} tokens/s. Differences from the CPU in float32: "
        + "; ".join(
            f"{name}: logprobs {one['logprob']:.1e}, gradient {one['gradient']:.1e},"
            f" {one['equal_sampled_tokens']:.0f} sampled tokens equal"
            for name, one in found["differences"].items()
        )
    )
    kernels = [ok("kernels", line) for line in found["kernels"]]
    if found["is_equal"]:
        return [ok("device", text), *kernels]
    return [failed("device", text, "send us this report; serve with `--device cpu` meanwhile"), *kernels]


def torch_finding(found: dict[str, Any]) -> Finding:
    ratio = found["rates"]["bfloat16"] / found["rates"]["float32"]
    text = (
        f"{found['version']}, {found['threads']} threads, {found['capability']}; bfloat16 is {ratio:.1f} times as fast"
        f" as float32, so dtype=auto takes {found['dtype']}"
    )
    if not found["onednn"]:
        return warning("torch", text + "; without oneDNN", "install a build of torch with oneDNN: it is much faster")
    return ok("torch", text)


def gpu_finding(found: dict[str, Any]) -> Finding:
    if found["gpus"] or found["device"] == "mps":
        return ok("gpu", f"{', '.join(found['gpus']) or 'Apple'}; device=auto takes {found['device']}")
    if shutil.which("nvidia-smi"):
        build = f"is built for CUDA {found['cuda']}" if found["cuda"] else "is a build without CUDA"
        return warning("gpu", f"there is an NVIDIA driver, but torch sees no GPU and {build}", "install torch for CUDA")
    return ok("gpu", "none; the CPU is used")


def memory_finding(found: dict[str, Any]) -> Finding:
    from lorimer.cli.output import size_text

    text = f"{size_text(found['free_bytes'])} free of {size_text(found['total_bytes'])}"
    if found["free_bytes"] < MIN_MEMORY:
        return warning("memory", text, "close other programs, or serve a small model; `lorimer model info` has needs")
    return ok("memory", text)
