"""Tokens and download addresses: what is ours holds until its end, anything else does not."""

from datetime import UTC, datetime, timedelta
from urllib.parse import parse_qs, urlsplit

import jwt
import pytest

from lorimer.errors import Forbidden, Gone, Unauthorized
from lorimer.server.signing import DOWNLOADS, TOKEN_SECONDS, Claims, Signer
from lorimer.store.users import User

NOW = datetime(2026, 5, 1, 12, 30, 15, 250_000, tzinfo=UTC)
USER = User("u1", "ada", "ada@example.org", NOW)
SIGNER = Signer(b"s" * 32)


def test_token_speaks_for_its_user_and_key():
    assert SIGNER.read_token(SIGNER.issue_token(USER, 7, NOW), NOW) == Claims("u1", 7)


def test_token_has_the_claims_the_sdk_reads():
    claims = jwt.decode(SIGNER.issue_token(USER, 7, NOW), options={"verify_signature": False})
    assert claims["sub"] == "tml:user:u1"
    assert claims["email"] == "ada@example.org"
    assert claims["org_id"]
    assert claims["iss"].startswith("passport-")
    assert claims["exp"] - NOW.timestamp() >= 12 * 3600 - 1


@pytest.mark.parametrize(
    "token",
    [
        "",
        "eyJ.x.y",
        Signer(b"t" * 32).issue_token(USER, 7, NOW),
        jwt.encode({"sub": "tml:user:u1", "exp": 9e9, "iss": "passport-lorimer"}, "", algorithm="none"),
    ],
    ids=["empty", "garbage", "another server's", "unsigned"],
)
def test_foreign_token_is_refused(token):
    with pytest.raises(Unauthorized, match="not issued by this server"):
        SIGNER.read_token(token, NOW)


def test_token_ends():
    token = SIGNER.issue_token(USER, None, NOW)
    SIGNER.read_token(token, NOW + timedelta(seconds=TOKEN_SECONDS - 2))
    with pytest.raises(Unauthorized, match="expired"):
        SIGNER.read_token(token, NOW + timedelta(seconds=TOKEN_SECONDS))


def signed(path, seconds=60):
    url, expires = SIGNER.sign_download(path, NOW, seconds)
    query = parse_qs(urlsplit(url).query)
    return urlsplit(url).path, query["expires"][0], query["signature"][0], expires


def test_download_address_holds_until_its_end():
    path, expires, signature, ends_at = signed(DOWNLOADS + "files/a:train:0/weights/x/k/adapter_config.json")
    assert path == DOWNLOADS + "files/a:train:0/weights/x/k/adapter_config.json"
    assert ends_at.timestamp() == int(expires)
    assert timedelta(seconds=59) <= ends_at - NOW <= timedelta(seconds=60)
    SIGNER.check_download(path, expires, signature, NOW)
    with pytest.raises(Gone, match="expired"):
        SIGNER.check_download(path, expires, signature, ends_at)


@pytest.mark.parametrize("part", ["path", "expires", "signature", "other server"])
def test_changed_download_address_is_refused(part):
    path, expires, signature, _ = signed(DOWNLOADS + "files/k/x")
    signer = Signer(b"t" * 32) if part == "other server" else SIGNER
    with pytest.raises(Forbidden, match="not signed"):
        signer.check_download(
            path + "y" * (part == "path"),
            expires if part != "expires" else str(int(expires) + 1),
            signature if part != "signature" else "é" + signature[1:],
            NOW,
        )
