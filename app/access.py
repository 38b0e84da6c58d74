"""API keys and request rates. Pure: the caller gives the clock."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping
from dataclasses import dataclass, field

from app.errors import RateLimited, Unauthorized


@dataclass(slots=True)
class _Bucket:
    tokens: float
    updated: float


@dataclass(slots=True)
class Access:
    """Checks the key of a request and spends from its rate limit.

    Args:
        keys: accepted API keys; empty accepts everybody under one common limit.
        requests_per_minute: limit per key; None for none.
    """

    keys: frozenset[str]
    requests_per_minute: int | None
    _digests: list[bytes] = field(init=False)
    _buckets: dict[bytes, _Bucket] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self._digests = [_digest(key) for key in self.keys]

    @classmethod
    def from_env(
        cls, variable: str | None, environ: Mapping[str, str], requests_per_minute: int | None
    ) -> Access:
        """Keys from a comma-separated environment variable.

        Raises:
            ValueError: the variable is named but empty; serving everybody would be a surprise.
        """
        if variable is None:
            return cls(frozenset(), requests_per_minute)
        keys = frozenset(k.strip() for k in environ.get(variable, "").split(",") if k.strip())
        if not keys:
            raise ValueError(
                f"limits.api_keys_env names {variable}, which holds no keys: set it to "
                "comma-separated keys, or remove limits.api_keys_env"
            )
        return cls(keys, requests_per_minute)

    def check(self, authorization: str | None, now: float) -> None:
        """Admit one request.

        Args:
            authorization: the request's Authorization header.
            now: monotonic seconds.

        Raises:
            Unauthorized: no key, or none of ours.
            RateLimited: the key has used up its minute.
        """
        owner = b""
        if self._digests:
            scheme, _, key = (authorization or "").partition(" ")
            digest = _digest(key.strip())
            # Every known key is compared, in constant time each.
            matches = [hmac.compare_digest(digest, known) for known in self._digests]
            if scheme.lower() != "bearer" or not any(matches):
                raise Unauthorized()
            owner = digest
        self._spend(owner, now)

    def _spend(self, owner: bytes, now: float) -> None:
        limit = self.requests_per_minute
        if limit is None:
            return
        bucket = self._buckets.setdefault(owner, _Bucket(float(limit), now))
        bucket.tokens = min(float(limit), bucket.tokens + (now - bucket.updated) * limit / 60)
        bucket.updated = now
        if bucket.tokens < 1:
            raise RateLimited(limit, (1 - bucket.tokens) * 60 / limit)
        bucket.tokens -= 1


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()
