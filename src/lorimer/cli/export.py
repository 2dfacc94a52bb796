"""``lorimer export``: a checkpoint or an adapter directory becomes something that other programs open."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from lorimer.cli.commands import ServerOptions, cli_command
from lorimer.cli.model import cache_directory, source_named
from lorimer.cli.output import Format, examples, note, print_facts, print_json, size_text
from lorimer.cli.progress import Report, progress_bar
from lorimer.cli.selection import path_of
from lorimer.cli.settings import ConfigOption
from lorimer.errors import InvalidInput, ModelNotFound

if TYPE_CHECKING:
    from lorimer.models.export.export import Exported
    from lorimer.models.export.merging import MergedDtype

SCHEME = "tinker://"


class Target(StrEnum):
    peft = "peft"
    merged = "merged"
    gguf = "gguf"
    ollama = "ollama"


class PushedForm(StrEnum):
    """What ``lorimer checkpoint push-hf`` uploads."""

    adapter = "adapter"
    merged = "merged"
    gguf = "gguf"


class Dtype(StrEnum):
    auto = "auto"
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"
    q8_0 = "q8_0"


BaseOption = Annotated[
    str | None,
    typer.Option("--base", metavar="SOURCE", help="Base model: a directory, a .gguf file, an alias or a hub id."),
]
DtypeOption = Annotated[Dtype, typer.Option("--dtype", help="Of merged weights; auto keeps the base's.")]
CheckOption = Annotated[
    bool, typer.Option("--check/--no-check", help="Compare the result with the base and its adapter.")
]
LlamaCppOption = Annotated[
    Path | None, typer.Option("--llama-cpp", metavar="DIR", help="A checkout of llama.cpp, for gguf and ollama.")
]


@dataclass(frozen=True, kw_only=True)
class Conversion:
    """How an adapter becomes another format."""

    base: str | None
    dtype: Dtype
    is_checked: bool
    llama_cpp: Path | None
    config: Path | None


EPILOG = examples(
    "lorimer export tinker://3f9c…:train:0/sampler_weights/final --to merged -o my-model",
    "lorimer export tinker://3f9c…:train:0/weights/step-100 --to peft",
    "lorimer export ./adapter --to gguf --base Qwen/Qwen3-0.6B --dtype q8_0 -o my-model.gguf",
    "lorimer export tinker://3f9c…:train:0/sampler_weights/final --to ollama -o my-model",
)


@cli_command
def export(
    source: Annotated[
        str,
        typer.Argument(
            metavar="PATH|DIRECTORY", help="tinker:// path of a checkpoint, RUN@STEP, RUN@last, or a LoRA directory."
        ),
    ],
    to: Annotated[
        Target,
        typer.Option("--to", help="PEFT directory, Hugging Face directory, file for llama.cpp, or Ollama."),
    ],
    destination: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="DIR", help="What is written; a .gguf file for gguf.")
    ] = None,
    base: BaseOption = None,
    dtype: DtypeOption = Dtype.auto,
    is_checked: CheckOption = True,
    llama_cpp: LlamaCppOption = None,
    config: ConfigOption = None,
    *,
    options: ServerOptions,
) -> None:
    """Write a checkpoint as a PEFT directory, merged into its base model, as a GGUF file, or with a Modelfile.

    The result is compared with the base and its adapter before it appears: more than rounding is refused.
    """
    check_options(to, dtype)
    if "@" in source and not Path(source).exists():
        source = path_of(options.rest_client(), source)
    target = destination or default_output(source, to)
    how = Conversion(base=base, dtype=dtype, is_checked=is_checked, llama_cpp=llama_cpp, config=config)
    with adapter_directory(source, target, options) as adapter, progress_bar() as report:
        exported = convert(adapter, to, target, how, report)
    show(exported, to, options.output)


def check_options(to: Target, dtype: Dtype) -> None:
    if dtype is Dtype.q8_0 and to not in (Target.gguf, Target.ollama):
        raise InvalidInput(
            f"--dtype {dtype.value!r} is for --to gguf and ollama; auto, float32, bfloat16, float16 are accepted"
        )
    if dtype is not Dtype.auto and to is Target.peft:
        raise InvalidInput(
            f"--dtype {dtype.value!r}: an adapter stays float32; --to merged, gguf and ollama take a dtype"
        )


def check_form(form: PushedForm, base: str | None, dtype: Dtype) -> None:
    if form is PushedForm.adapter:
        if base is not None or dtype is not Dtype.auto:
            raise InvalidInput("--base and --dtype are for --as merged and gguf; an adapter is uploaded as it is")
    else:
        check_options(Target(form.value), dtype)


def default_output(source: str, to: Target) -> Path:
    from lorimer.cli.download import directory_name

    name = directory_name(source) if source.startswith(SCHEME) else Path(source).resolve().name
    return Path(f"{name}.gguf" if to is Target.gguf else f"{name}-{to.value}")


@contextmanager
def adapter_directory(source: str, target: Path, options: ServerOptions) -> Iterator[Path]:
    """The adapter on disk: as it is, or downloaded beside the target for as long as the block runs."""
    if not source.startswith(SCHEME):
        if not Path(source).is_dir():
            raise InvalidInput(
                f"{source!r} is no directory; a LoRA directory, a {SCHEME} path, or RUN@STEP is accepted"
            )
        yield Path(source)
        return
    from lorimer.cli.download import download_checkpoint

    client = options.rest_client()
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".lorimer-") as temporary:
        adapter = Path(temporary) / "adapter"
        download_checkpoint(client, source, adapter, force=False)
        yield adapter


def convert(adapter: Path, to: Target, target: Path, how: Conversion, report: Report) -> "Exported":
    """Write the adapter, or the model of a full run, in another format to ``target``."""
    report("loading", None)
    from lorimer.models.export import export as exports

    cache = cache_directory(how.config)
    if exports.is_full_run(adapter):
        if to is Target.peft or how.base is not None:
            raise InvalidInput(
                "this is a full run, a whole model without an adapter or a base; --to merged, gguf or ollama is"
                " accepted, without --base"
            )
        if to is Target.merged:
            return exports.export_full(adapter, target, how.dtype.value)
        directory = adapter
        write_gguf = partial(exports.export_full_gguf, adapter)
    else:
        if to is Target.peft:
            return exports.export_peft(adapter, target, how.base or exports.base_model_of(adapter))
        directory = find_base(how.base, None if how.base else exports.base_model_of(adapter), cache, how.config, report)
        if to is Target.merged:
            merged_dtype = cast("MergedDtype", how.dtype.value)  # q8_0 was refused above
            return exports.export_merged(
                adapter, directory, target, merged_dtype, is_checked=how.is_checked, progress=report
            )
        write_gguf = partial(exports.export_gguf, adapter, directory)

    def write(file: Path) -> "Exported":
        return write_gguf(
            file, how.dtype.value, llama_cpp=how.llama_cpp, cache=cache, is_checked=how.is_checked, progress=report
        )

    return write(target) if to is Target.gguf else exports.export_ollama(directory, target, write)


def find_base(
    given: str | None, trained_on: str | None, cache: Path | None, config: Path | None, report: Report
) -> Path:
    """The directory of the base model, by the rules of ``lorimer serve``: its names of models come first."""
    from lorimer.models.sources import resolve

    if given:
        return resolve(given, cache_directory=cache, progress=report).directory
    assert trained_on is not None
    try:
        return resolve(source_named(trained_on, config), cache_directory=cache, progress=report).directory
    except (ModelNotFound, InvalidInput) as error:
        raise ModelNotFound(
            f"the adapter was trained on {trained_on!r}, which is not found here; --base names another source\n{error}"
        ) from error


def show(exported: "Exported", to: Target, output_format: Format) -> None:
    found = exported.comparison
    if output_format is Format.json:
        print_json(asdict(exported) | {"to": to.value})
        return
    facts: dict[str, object] = {"written": exported.path, "size": size_text(exported.size_bytes)}
    if found is not None:
        facts["checked"] = (
            f"log probabilities differ from the base with its adapter by at most {found.difference:.2g}"
            f" (the adapter changes them by up to {found.effect:.2g})"
        )
        if found.difference > found.effect / 2:
            note("lorimer: rounding the merged weights hides much of this small adapter; --dtype float32 keeps it")
    elif to is not Target.peft:
        facts["checked"] = "no"
    if exported.read_back is not None and exported.read_back.difference is not None:
        difference = exported.read_back.difference
        facts["read back"] = f"log probabilities differ from the merged model by at most {difference:.2g}"
    elif exported.read_back is not None:
        facts["read back"] = f"not compared: Lorimer's own reader does not know this kind: {exported.read_back.reason}"
    print_facts(facts)
