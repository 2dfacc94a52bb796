"""Loads the conformance tests a second time, as if they began with ``import lorimer as tinker``."""

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import ModuleType

import lorimer

PACKAGE = "tests.conformance"
SAME = tuple(f"{PACKAGE}.{name}" for name in ("conftest", "idle", "old", "own", "postgres", "servers", "users"))
"""Modules that the second run shares with the first."""
ALIASES = {"tinker": lorimer, "tinker.types": lorimer.types}


def same_tests(path: str) -> dict[str, object]:
    """The names of the module of the same file name one folder above, for pytest to find in that of ``path``."""
    module = load(Path(path).stem)
    return {name: value for name, value in vars(module).items() if not name.startswith("__")}


@cache
def load(name: str) -> ModuleType:
    with tinker_is_lorimer():
        return importlib.import_module(f"{PACKAGE}.{name}")


@contextmanager
def tinker_is_lorimer() -> Iterator[None]:
    """What is imported within gets our SDK under the official name; nothing of it is left for others to find."""
    hidden = {name: sys.modules.pop(name) for name in list(sys.modules) if names_the_sdk(name)}
    sys.modules |= ALIASES
    try:
        yield
    finally:
        for name in list(sys.modules):
            if names_the_sdk(name):
                del sys.modules[name]
                forget(name)
        sys.modules |= hidden
        for name, module in hidden.items():
            remember(name, module)


def forget(name: str) -> None:
    """Modules are attributes of their package too, where ``from package import module`` finds them."""
    package, _, attribute = name.rpartition(".")
    if package == PACKAGE:
        vars(sys.modules[package]).pop(attribute, None)


def remember(name: str, module: ModuleType) -> None:
    package, _, attribute = name.rpartition(".")
    if package == PACKAGE:
        setattr(sys.modules[package], attribute, module)


def names_the_sdk(module: str) -> bool:
    if module.startswith(f"{PACKAGE}."):
        return not module.startswith(SAME)
    return module.partition(".")[0] == "tinker"
