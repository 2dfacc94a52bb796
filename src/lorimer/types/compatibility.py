"""Differences between releases of the SDK: the flags each is sent, and what each can read.

A client without a version counts as the newest release.
"""

import re
from collections.abc import Mapping
from typing import Any, NamedTuple, Self

PROTOBUF = "application/x-protobuf"

_VERSION = re.compile(r"(\d{1,6})\.(\d{1,6})(?:\.(\d{1,6}))?")


class SdkVersion(NamedTuple):
    """A release of the official SDK; compares numerically."""

    major: int
    minor: int
    patch: int = 0

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """Parse ``0.36.0``, ``0.36.0rc1`` or a user agent; ``None`` if there is no version."""
        found = _VERSION.search(text)
        return None if found is None else cls(*(int(part or 0) for part in found.groups()))

    @classmethod
    def of_request(cls, headers: Mapping[str, str], sdk_version: str = "") -> Self:
        """Return the release that sent a request: the version in its body, its package header or its user agent."""
        agent = headers.get("user-agent") or headers.get("User-Agent") or ""
        package = headers.get("x-stainless-package-version") or headers.get("X-Stainless-Package-Version") or ""
        for text in (sdk_version, package, agent if "tinker" in agent.lower() else ""):
            if version := cls.parse(text):
                return version
        return cls(*NEWEST)

    def __str__(self) -> str:
        return f"{self.major}.{self.minor}.{self.patch}"


NEWEST = SdkVersion(0, 36, 0)
_FIRST_WITH_FLAG: dict[str, SdkVersion] = {
    "create_model_via_load_weights": SdkVersion(0, 24, 1),
    "proto_compress_fwdbwd": SdkVersion(0, 25, 0),
    "sample_use_retrieve_futures": SdkVersion(0, 26, 2),
    "sample_join_sampling_session": SdkVersion(0, 32, 0),
    "custom_loss_server_side": SdkVersion(0, 36, 0),
}
_FIRST_WITH_CANCEL = SdkVersion(0, 26, 0)
_FIRST_WITH_EXTERNAL = SdkVersion(0, 28, 0)
_LOSES_REDIRECTS = (SdkVersion(0, 22, 0), SdkVersion(0, 22, 1))
"""With their newer transport, these releases follow the redirect to an archive and return its bytes to the caller."""


def client_config(version: SdkVersion) -> dict[str, Any]:
    """Return the flags sent to a release once, in addition to the defaults of ``ClientConfigResponse``."""
    flags = {flag: True for flag, first in _FIRST_WITH_FLAG.items() if version >= first}
    if version in _LOSES_REDIRECTS:
        flags["use_pyqwest_transport"] = False
    return flags


def dynamic_config(version: SdkVersion) -> dict[str, Any]:
    """Return the flags that a release polls."""
    return {"sample_cancel_enabled": True} if version >= _FIRST_WITH_CANCEL else {}


def knows_external(version: SdkVersion) -> bool:
    """Return whether a release can list external checkpoints; one of them breaks the whole list for others."""
    return version >= _FIRST_WITH_EXTERNAL


def accepts_protobuf(accept: str) -> bool:
    """Return whether the ``Accept`` header allows a protobuf result."""
    return PROTOBUF in accept.lower()
