"""Packages that only some calls need and that a client may be without: loaded when such a call is made."""

import importlib
from typing import Any

TORCH = "PyTorch (pip install torch)"


def load(module: str, purpose: str, package: str) -> Any:
    """The module, or an ``ImportError`` that says what it is needed for and how to get it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(f"{purpose} needs {package}, which cannot be loaded ({error})") from error


def load_torch(purpose: str) -> Any:
    return load("torch", purpose, TORCH)
