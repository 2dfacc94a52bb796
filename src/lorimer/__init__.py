"""Lorimer: an open training API that you run yourself, speaking the Tinker protocol.

This module holds the public names. It loads neither torch nor the server, so that it is cheap to import anywhere.
"""

from lorimer import errors as errors

__version__ = "0.1.0"

__all__ = ["__version__", "errors"]
