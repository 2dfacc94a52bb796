"""Graders that are chosen by a name: exact, numeric, contains, regex, or a function of one's own in a file."""

import hashlib
import importlib.util
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lorimer.cookbook.evaluation import Grader, exact_match
from lorimer.cookbook.gsm8k import is_correct
from lorimer.errors import InvalidInput

ACCEPTED = "exact, numeric, contains, regex and python:FILE:FUNCTION"


def named_grader(name: str) -> Grader:
    """Return the grader of a name. Refuse a file or function that is not there before anything is sampled."""
    if name in _GRADERS:
        return _GRADERS[name]
    if name.startswith("python:"):
        return _load(name)
    raise InvalidInput(f"there is no grader {name!r}; accepted are {ACCEPTED}")


def grader_settings(name: str) -> dict[str, str]:
    """Return what a result says of its grader: the name, and of a function in a file its content, not its place."""
    if not name.startswith("python:"):
        return {"grader": name}
    file, _, function = name.removeprefix("python:").rpartition(":")
    path = Path(file).expanduser()
    digest = hashlib.blake2b(path.read_bytes(), digest_size=6).hexdigest()
    return {"grader": f"python:{path.name}:{function}", "grader_digest": digest}


def grade_number(reply: str, row: Any) -> bool:
    """Return whether the number after the last ``####`` of the reply, else its last number, is the answer's."""
    return is_correct(reply, str(row["answer"]), fallback=True)


def grade_contained(reply: str, row: Any) -> bool:
    """Return whether the reply contains the answer, whatever the case of letters."""
    return str(row["answer"]).strip().casefold() in reply.casefold()


def grade_pattern(reply: str, row: Any) -> bool:
    """Return whether the regular expression that is the answer is found in the reply."""
    try:
        return re.search(str(row["answer"]), reply) is not None
    except re.error as error:
        raise InvalidInput(f"the answer {row['answer']!r} is not a regular expression: {error}") from None


_GRADERS: dict[str, Grader] = {
    "exact": exact_match(),
    "numeric": grade_number,
    "contains": grade_contained,
    "regex": grade_pattern,
}


def _load(name: str) -> Callable[[str, Any], Any]:
    file, _, function = name.removeprefix("python:").rpartition(":")
    path = Path(file).expanduser()
    if not file or not function or not path.is_file():
        raise InvalidInput(f"the grader is {name!r}; python:FILE:FUNCTION with a file that is there is accepted")
    spec = importlib.util.spec_from_file_location(f"lorimer_grader_{path.stem}", path.resolve())
    if spec is None or spec.loader is None:
        raise InvalidInput(f"{str(path)!r} is not a Python file; one that ends in .py is accepted")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise InvalidInput(f"{str(path)!r} cannot be loaded: {type(error).__name__}: {error}") from error
    found = getattr(module, function, None)
    if not callable(found):
        raise InvalidInput(f"{str(path)!r} has no function {function!r}; a function of (reply, row) is accepted")
    grader: Callable[[str, Any], Any] = found
    return grader
