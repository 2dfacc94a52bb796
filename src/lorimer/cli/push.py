"""Puts a checkpoint on the Hugging Face hub: a PEFT adapter, a merged model or a GGUF file, with a model card."""

import json
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from lorimer.cli.download import directory_name, download_checkpoint
from lorimer.cli.export import Conversion, PushedForm, Target, convert
from lorimer.cli.output import note
from lorimer.cli.progress import progress_bar
from lorimer.errors import CheckpointError, HubError

if TYPE_CHECKING:
    from lorimer.client.rest import RestClient
    from lorimer.types import WeightsInfoResponse

ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")


@dataclass(frozen=True)
class Pushed:
    repo_id: str
    revision: str | None
    commit: str
    url: str


def push_checkpoint(
    client: "RestClient",
    tinker_path: str,
    repo_id: str | None,
    form: PushedForm,
    how: Conversion,
    *,
    public: bool,
    revision: str | None,
    message: str | None,
    create_pr: bool,
    with_card: bool,
) -> Pushed:
    """Upload the checkpoint; who is logged in and what is to be sent are checked before anything is made on the hub."""
    try:
        from huggingface_hub import HfApi
    except ImportError as error:
        raise HubError("the package huggingface_hub is missing: pip install huggingface_hub") from error
    api = HfApi()
    with hub_errors("nobody is logged in to the hub; `hf auth login` does it, or HF_TOKEN"):
        user = api.whoami()["name"]
    info = client.get_weights_info_by_tinker_path(tinker_path).result()
    with tempfile.TemporaryDirectory(prefix="lorimer-") as temporary:
        saved = Path(temporary) / directory_name(tinker_path)
        download_checkpoint(client, tinker_path, saved, force=False)
        repo_id = repo_id or repo_name(info.base_model, tinker_path, form)
        repo_id = repo_id if "/" in repo_id else f"{user}/{repo_id}"  # as the hub would; the card names it in full
        folder = prepare(saved, Path(temporary) / "pushed", tinker_path, info.base_model, form, how)
        if with_card:
            (folder / "README.md").write_text(model_card(repo_id, tinker_path, info, form, folder), "utf-8")
        with hub_errors(f"the hub does not take {repo_id!r}"):
            repo_id = api.create_repo(repo_id, private=not public, exist_ok=True).repo_id
            if revision is not None and not create_pr:
                api.create_branch(repo_id, branch=revision, exist_ok=True)
            note(f"uploading to {repo_id}")
            commit = api.upload_folder(
                repo_id=repo_id,
                folder_path=folder,
                revision=revision,
                commit_message=message or f"Upload {tinker_path}",
                create_pr=create_pr,
            )
    return Pushed(repo_id, revision, commit.oid, commit.pr_url or commit.commit_url)


@contextmanager
def hub_errors(what: str) -> Iterator[None]:
    """The errors of the hub's package, in one line; they are of many classes."""
    import httpx

    try:
        yield
    except (OSError, ValueError, httpx.HTTPError) as error:
        reason = next(iter(str(error).strip().splitlines()), "") or type(error).__name__
        raise HubError(f"{what} ({reason})") from error


def prepare(saved: Path, converted: Path, tinker_path: str, base_model: str, form: PushedForm, how: Conversion) -> Path:
    """Return the directory to upload: the adapter itself, or what it is converted to."""
    is_full = (saved / "config.json").exists() and not (saved / ADAPTER_FILES[0]).exists()
    if not is_full or form is PushedForm.adapter:
        complete_adapter(saved, tinker_path, base_model)
    if form is PushedForm.adapter:
        return saved
    target = converted
    if form is PushedForm.gguf:
        target = converted / f"{repo_name(base_model, tinker_path, form)}.gguf"
    with progress_bar() as report:
        convert(saved, Target(form.value), target, how, report)
    return converted


def complete_adapter(folder: Path, tinker_path: str, base_model: str) -> None:
    """See that it is an adapter, and that the adapter names its base."""
    if missing := [name for name in ADAPTER_FILES if not (folder / name).exists()]:
        found = ", ".join(sorted(file.name for file in folder.iterdir()))
        raise CheckpointError(
            f"{tinker_path!r} has {found} and no {' or '.join(missing)}; adapters that are not encrypted are accepted;"
            " a full run is pushed with --as merged or gguf"
        )
    file = folder / "adapter_config.json"
    config = json.loads(file.read_bytes())
    if not config.get("base_model_name_or_path"):
        file.write_text(json.dumps(config | {"base_model_name_or_path": base_model}, indent=2) + "\n", "utf-8")


def repo_name(base_model: str, tinker_path: str, form: PushedForm = PushedForm.adapter) -> str:
    """A name made of the base model and the path, of characters that the hub takes."""
    ending = "" if form is PushedForm.adapter else f"-{form.value}"
    text = f"{base_model.rpartition('/')[2]}-{directory_name(tinker_path)}"
    text = re.sub(r"-{2,}|\.{2,}", "-", re.sub(r"[^A-Za-z0-9._-]", "-", text))
    return text[: 96 - len(ending)].strip("-.") + ending


def model_card(repo_id: str, tinker_path: str, info: "WeightsInfoResponse", form: PushedForm, folder: Path) -> str:
    """Return the README.md of the repository: what was trained, on what, and how to load it."""
    library, tags, title, usage = CARDS[form]
    # Strings of JSON are strings of YAML and Python too.
    base, source, name = (json.dumps(text) for text in (info.base_model, tinker_path, repo_id))
    relation = "" if form is PushedForm.adapter else "base_model_relation: finetune\npipeline_tag: text-generation\n"
    file = next((path.name for path in folder.glob("*.gguf")), "")
    lines = "\n".join(f"- {tag}" for tag in tags)
    return f"""---
base_model: {base}
{relation}library_name: {library}
tags:
{lines}
tinker_path: {source}
---

# {title} {info.base_model}

Trained with Lorimer{trained_text(info)}.

{usage.format(base=base, name=name, repo=repo_id, file=file).strip()}
"""


def trained_text(info: "WeightsInfoResponse") -> str:
    parts = {"attention": info.train_attn, "MLP": info.train_mlp, "output head": info.train_unembed}
    trained = ", ".join(name for name, is_trained in parts.items() if is_trained)
    if not info.lora_rank:
        return ""
    return f"; rank {info.lora_rank}{f', on {trained}' if trained else ''}"


CARDS = {
    PushedForm.adapter: (
        "peft",
        ("lora", "peft"),
        "LoRA adapter for",
        """
```python
from peft import PeftModel
from transformers import AutoModelForCausalLM

base = AutoModelForCausalLM.from_pretrained({base})
model = PeftModel.from_pretrained(base, {name})
```
""",
    ),
    PushedForm.merged: (
        "transformers",
        ("lorimer",),
        "Fine-tuned",
        """
```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained({name})
model = AutoModelForCausalLM.from_pretrained({name})
```
""",
    ),
    PushedForm.gguf: (
        "gguf",
        ("gguf", "llama-cpp"),
        "GGUF file of a fine-tuned",
        """
```sh
hf download {repo} {file} --local-dir .
llama-cli -m {file}
```
""",
    ),
}
"""Library, tags, title and usage of each form."""
