"""The tokenizer inside a GGUF file, written as `tokenizer.json` and `tokenizer_config.json`.

Two kinds are rebuilt exactly: byte-level BPE (`gpt2`) whose way of cutting text into words is known by its llama.cpp
name, and SentencePiece BPE (`llama`) with byte fallback. Every other kind is refused by its name.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import AutoTokenizer

from lorimer.errors import ModelRefused

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = 1, 2, 3, 4, 5

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace("{1,3}", "")

_WORDS: dict[str, list[str]] = {
    "default": [r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]"],
    "gpt-2": [_GPT2],
    "smollm": [r"\p{N}", _GPT2],
    "llama-bpe": [_LLAMA3],
    "llama3": [_LLAMA3],
    "llama-v3": [_LLAMA3],
    "qwen2": [_QWEN2],
}
"""For each `tokenizer.ggml.pre` the expressions that cut a text, each applied to the pieces the one before left."""

_LLAMA3_NAMES = ("llama-bpe", "llama3", "llama-v3")

_DIFFICULT = (
    "It's  12345 6 78.9 I'M WE'LL don't_x a1b2  (x>=0)\t!!??...\n\n  \r\n end\u00a0\u2003 caf\u00e9 cafe\u0301"
    " \u65e5\u672c \u0661\u0662\u0663\u00bd\u2167 \U0001f680\U0001f468\u200d\U0001f469 -+<>^~|$ ``` 'tis ''  \n x \t\ty"
)

_PROBE = "It's  12345 cafe\u0301 \u65e5\u672c\u8a9e!!\n\n  (x>=0)\tend "


def write_tokenizer(metadata: Mapping[str, Any], out: Path) -> None:
    """Write the tokenizer that `metadata` describes into `out`, which already holds `config.json`.

    Raises `ModelRefused` for a kind that cannot be rebuilt, and when transformers would load another tokenizer from it.
    """
    tokens = _strings(metadata, "tokens")
    kinds = metadata.get("tokenizer.ggml.token_type") or [_NORMAL] * len(tokens)
    if len(kinds) != len(tokens):
        raise ModelRefused(f"tokenizer.ggml.token_type has {len(kinds)} entries for {len(tokens)} tokens")
    name = metadata.get("tokenizer.ggml.model")
    if name == "gpt2":
        tokenizer = _byte_level(metadata, tokens, kinds)
    elif name == "llama":
        tokenizer = _sentencepiece(metadata, tokens, kinds)
    else:
        raise ModelRefused(f"tokenizer.ggml.model {name!r} cannot be rebuilt exactly; 'gpt2' and 'llama' can")
    _add_whole_tokens(tokenizer, tokens, kinds)
    tokenizer.post_processor = _frame(metadata, tokens)
    tokenizer.save(str(out / "tokenizer.json"))
    (out / "tokenizer_config.json").write_text(
        json.dumps(_settings(metadata, tokens), indent=2) + "\n", encoding="utf-8"
    )

    loaded = AutoTokenizer.from_pretrained(out, local_files_only=True)
    whole = [token for token, kind in zip(tokens, kinds, strict=True) if kind in (_CONTROL, _USER_DEFINED)]
    probe = _PROBE + " a".join(whole) + _PROBE
    if loaded.encode(probe) != tokenizer.encode(probe).ids:
        pre = metadata.get("tokenizer.ggml.pre")
        raise ModelRefused(
            f"transformers replaces the tokenizer of architecture {metadata.get('general.architecture')!r} "
            f"with its own {type(loaded).__name__}, which is not the {name!r} tokenizer of this file ({pre=})"
        )


def words_name(tokenizer: Tokenizer) -> str | None:
    """Return the `tokenizer.ggml.pre` whose rule splits a difficult text as this tokenizer does; None without one."""
    if tokenizer.pre_tokenizer is None or not isinstance(tokenizer.model, models.BPE):
        return None
    wanted = _cut(tokenizer.pre_tokenizer)
    return next((name for name in _WORDS if _cut(_splitter(name)) == wanted), None)


def _cut(splitter: pre_tokenizers.PreTokenizer) -> list[str]:
    return [word for word, _ in splitter.pre_tokenize_str(_DIFFICULT)]


def special_id(
    metadata: Mapping[str, Any], role: Literal["bos", "eos", "eot", "eom", "unknown", "padding"]
) -> int | None:
    """Return the id of the token with this role, or None if the file names none."""
    token_id = metadata.get(f"tokenizer.ggml.{role}_token_id")
    if token_id is None:
        return None
    num_tokens = len(_strings(metadata, "tokens"))
    if not isinstance(token_id, int) or not 0 <= token_id < num_tokens:
        raise ModelRefused(f"tokenizer.ggml.{role}_token_id {token_id!r} is not one of the {num_tokens} tokens")
    return token_id


def _strings(metadata: Mapping[str, Any], key: str) -> list[str]:
    values = metadata.get(f"tokenizer.ggml.{key}")
    if not isinstance(values, list) or not values or not all(isinstance(value, str) for value in values):
        raise ModelRefused(f"the file has no list of strings tokenizer.ggml.{key}, so its tokenizer cannot be rebuilt")
    return values


def _vocabulary(tokens: list[str], kinds: list[int]) -> dict[str, int]:
    """Return the ids of tokens that text can become; unused ones only pad the embedding."""
    vocab: dict[str, int] = {}
    for token_id, (token, kind) in enumerate(zip(tokens, kinds, strict=True)):
        if kind == _UNUSED:
            continue
        if token in vocab:
            raise ModelRefused(f"tokenizer.ggml.tokens has {token!r} twice, as {vocab[token]} and {token_id}")
        vocab[token] = token_id
    return vocab


def _byte_level(metadata: Mapping[str, Any], tokens: list[str], kinds: list[int]) -> Tokenizer:
    pre = metadata.get("tokenizer.ggml.pre", "default")
    if pre not in _WORDS:
        raise ModelRefused(f"tokenizer.ggml.pre {pre!r} cannot be rebuilt exactly; {', '.join(_WORDS)} can")
    merges = []
    for merge in _strings(metadata, "merges"):
        left, separator, right = merge.partition(" ")
        if not separator or not left or not right or " " in right:
            raise ModelRefused(
                f"tokenizer.ggml.merges has {merge!r}; two tokens with one space between them are needed"
            )
        merges.append((left, right))
    bpe = models.BPE(vocab=_vocabulary(tokens, kinds), merges=merges, ignore_merges=pre in _LLAMA3_NAMES)
    tokenizer = Tokenizer(bpe)
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _splitter(pre)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _splitter(pre: str) -> pre_tokenizers.PreTokenizer:
    splits = [pre_tokenizers.Split(Regex(words), behavior="isolated") for words in _WORDS[pre]]
    return pre_tokenizers.Sequence([*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def _sentencepiece(metadata: Mapping[str, Any], tokens: list[str], kinds: list[int]) -> Tokenizer:
    if metadata.get("tokenizer.ggml.precompiled_charsmap") or metadata.get("tokenizer.ggml.remove_extra_whitespaces"):
        raise ModelRefused("a SentencePiece tokenizer that normalises its text cannot be rebuilt exactly")
    vocab = _vocabulary(tokens, kinds)
    unknown = special_id(metadata, "unknown")
    bpe = models.BPE(
        vocab=vocab,
        merges=_merges_by_score(metadata, tokens, kinds),
        unk_token=tokens[0 if unknown is None else unknown],
        fuse_unk=True,
        byte_fallback=True,
    )
    tokenizer = Tokenizer(bpe)
    spaces: list[normalizers.Normalizer] = [normalizers.Replace(" ", "\u2581")]
    pieces: list[decoders.Decoder] = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    if metadata.get("tokenizer.ggml.add_space_prefix", True):
        spaces.insert(0, normalizers.Prepend("\u2581"))
        pieces.append(decoders.Strip(" ", 1, 0))
    tokenizer.normalizer = normalizers.Sequence(spaces)
    tokenizer.decoder = decoders.Sequence(pieces)
    return tokenizer


def _merges_by_score(metadata: Mapping[str, Any], tokens: list[str], kinds: list[int]) -> list[tuple[str, str]]:
    """Return the merges of SentencePiece, which joins the neighbours whose union has the best score."""
    scores = metadata.get("tokenizer.ggml.scores")
    if not isinstance(scores, list) or len(scores) != len(tokens):
        raise ModelRefused(
            f"a SentencePiece tokenizer needs one of tokenizer.ggml.scores for each of {len(tokens)} tokens"
        )
    normal = {token: score for token, score, kind in zip(tokens, scores, kinds, strict=True) if kind == _NORMAL}
    if any(score != round(score) for score in normal.values()):
        raise ModelRefused(
            "tokenizer.ggml.scores are probabilities, so this is a SentencePiece Unigram vocabulary, "
            "which a GGUF file does not describe exactly; SentencePiece BPE has ranks"
        )
    merges = [
        (token[:cut], token[cut:], score)
        for token, score in normal.items()
        for cut in range(len(token) - 1, 0, -1)
        if token[:cut] in normal and token[cut:] in normal
    ]
    # Sorting keeps the order of the cuts of one token, longest left part first: text is joined from the left.
    merges.sort(key=lambda merge: -merge[2])
    return [(left, right) for left, right, _ in merges]


def _add_whole_tokens(tokenizer: Tokenizer, tokens: list[str], kinds: list[int]) -> None:
    """Add tokens that are never split: control tokens (`<|im_end|>`) as special, user-defined ones (`<think>`) not."""
    named = list(zip(tokens, kinds, strict=True))
    special = [AddedToken(t, normalized=False, special=True) for t, k in named if k in (_UNKNOWN, _CONTROL)]
    tokenizer.add_special_tokens(special)
    tokenizer.add_tokens([AddedToken(t, normalized=False, special=False) for t, k in named if k == _USER_DEFINED])


def _frame(metadata: Mapping[str, Any], tokens: list[str]) -> processors.PostProcessor:
    """Return the processor that adds begin and end tokens: those the file asks for, or llama.cpp's default."""
    is_bos_usual = metadata["tokenizer.ggml.model"] == "llama" or metadata.get("tokenizer.ggml.pre") in _LLAMA3_NAMES
    bos, eos = special_id(metadata, "bos"), special_id(metadata, "eos")
    first = [tokens[bos]] if bos is not None and metadata.get("tokenizer.ggml.add_bos_token", is_bos_usual) else []
    last = [tokens[eos]] if eos is not None and metadata.get("tokenizer.ggml.add_eos_token", False) else []
    return processors.TemplateProcessing(
        single=[*first, "$A", *last],
        pair=[*first, "$A", *last, *(f"{token}:1" for token in first), "$B:1", *(f"{token}:1" for token in last)],
        special_tokens=[(token, tokens.index(token)) for token in dict.fromkeys([*first, *last])],
    )


def _settings(metadata: Mapping[str, Any], tokens: list[str]) -> dict[str, Any]:
    bos, eos, unknown = (special_id(metadata, role) for role in ("bos", "eos", "unknown"))
    padding = special_id(metadata, "padding")
    roles = {"bos_token": bos, "eos_token": eos, "unk_token": unknown, "pad_token": eos if padding is None else padding}
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": metadata.get(f"{metadata['general.architecture']}.context_length"),
        **{role: tokens[token_id] for role, token_id in roles.items() if token_id is not None},
    }
    named = {
        name: metadata.get(f"tokenizer.chat_template.{name}") for name in metadata.get("tokenizer.chat_templates", [])
    }
    templates = {"default": metadata.get("tokenizer.chat_template"), **named}
    present = [{"name": name, "template": template} for name, template in templates.items() if template is not None]
    if present:
        only_default = len(present) == 1 and present[0]["name"] == "default"
        settings["chat_template"] = present[0]["template"] if only_default else present
    return settings
