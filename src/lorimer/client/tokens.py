"""Reads who a token speaks for; whether it is genuine is the server's to know."""

import base64
import binascii
import json
from typing import Any

from lorimer.client.errors import TinkerError


def claims_of(token: str) -> dict[str, Any]:
    try:
        payload = token.split(".")[1]
        claims = json.loads(base64.urlsafe_b64decode(payload + "=" * (-len(payload) % 4)))
    except (IndexError, ValueError, binascii.Error):
        raise TinkerError("the server's token is no JWT") from None
    if not isinstance(claims, dict):
        raise TinkerError("the server's token has no claims")
    return claims
