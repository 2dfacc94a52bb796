"""What describes one setting of the service, wherever it is declared."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Setting:
    """The meaning of a setting, as the documents say it, and the smallest number it may be."""

    text: str
    minimum: float | None = None
