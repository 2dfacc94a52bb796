"""Makes a tokenizer for a model without one, because some peers demand one: the text of token 17 is ``17``."""

from typing import Any

from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast

END = "<end>"


def make_tokenizer(vocab_size: int) -> Any:
    """Return a tokenizer whose end token is outside of the model's vocabulary, so that no sample ends early."""
    words = {str(token): token for token in range(vocab_size)} | {END: vocab_size}
    tokenizer = Tokenizer(WordLevel(words, unk_token="0"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, pad_token="0")
