"""Who may enter: API keys, compared in constant time. Every route is closed but those that a table opens."""

import hashlib
import hmac
from collections.abc import Sequence
from http import HTTPStatus

from starlette.exceptions import HTTPException

from wavecore.frontend.serve.http.http_call import HttpCall


class Access:
    """The keys of one server, kept as digests.

    Args:
        keys: none lets everybody in.
    """

    def __init__(self, keys: Sequence[str]) -> None:
        self._digests = [_digest(key) for key in keys]

    def check(self, call: HttpCall) -> None:
        """Let a request in, and note whose it is.

        Raises:
            HTTPException: 401, without a key or with a wrong one.
        """
        if not self._digests:
            return
        scheme, _, key = call.header(b"authorization").partition(" ")
        given = _digest(key.strip())
        found = [digest for digest in self._digests if hmac.compare_digest(digest, given)]  # always all of them
        if scheme.lower() != "bearer" or not found:
            headers = {"www-authenticate": "Bearer"}
            reason = "no such API key: send one of this server's as `Authorization: Bearer KEY`"
            raise HTTPException(HTTPStatus.UNAUTHORIZED, reason, headers)
        call.owner = found[0].hex()


def salt_of(owner: str, salt: str | None) -> str:
    """The cache salt of an owner's request: nobody finds out by the clock what others, with another key, have asked."""
    return hashlib.sha256(f"{owner} {salt or ''}".encode()).hexdigest()


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()
