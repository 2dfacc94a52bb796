"""Runs llama.cpp's converter, in a process of its own: `python -P llama_cpp.py ROOT PRE ARGUMENTS...`.

ROOT is a checkout of llama.cpp, or a zip archive of its converter. PRE names the rule by which text is cut for
tokenizers that the converter does not recognise; it may be empty. Imports nothing of Lorimer.
"""

import importlib
import os
import sys
from pathlib import Path
from typing import Any


def main(root: str, pre: str, arguments: list[str]) -> None:
    sys.path[:0] = [root, f"{root}/gguf-py"]
    os.environ["NO_LOCAL_GGUF"] = "1"  # it is on the path already
    script: Any = importlib.import_module("convert_hf_to_gguf")
    text_model: Any = importlib.import_module("conversion").TextModel
    recognise = text_model.get_vocab_base_pre

    def recognise_or_take_given(self: Any, tokenizer: Any) -> Any:
        try:
            return recognise(self, tokenizer)
        except NotImplementedError:
            if not pre:
                raise
            return pre

    def no_sentencepiece(self: Any) -> None:
        raise FileNotFoundError("tokenizer.model")

    text_model.get_vocab_base_pre = recognise_or_take_given
    if not (Path(arguments[0]) / "tokenizer.model").is_file():
        # It imports the package sentencepiece before it looks for the file.
        text_model._create_vocab_sentencepiece = no_sentencepiece
    sys.argv = ["convert_hf_to_gguf.py", *arguments]
    script.main()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
