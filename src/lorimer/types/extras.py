"""Loads optional packages when a call needs them."""

import importlib
from typing import Any

TORCH = "PyTorch (pip install torch)"


def load(module: str, purpose: str, package: str) -> Any:
    """Import a module, or raise ``ImportError`` that says what needs it and how to install it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(f"{purpose} needs {package}, which cannot be loaded ({error})") from error


def load_torch(purpose: str) -> Any:
    return load("torch", purpose, TORCH)
