import pytest

from app.access import Access
from app.errors import RateLimited, Unauthorized


def test_without_keys_everybody_may() -> None:
    Access.from_env(None, {}, None).check(None, 0.0)


@pytest.mark.parametrize("header", [None, "", "one", "Basic one", "Bearer", "Bearer three"])
def test_wrong_keys_are_refused(header: str | None) -> None:
    access = Access.from_env("KEYS", {"KEYS": "one, two"}, None)
    with pytest.raises(Unauthorized):
        access.check(header, 0.0)


@pytest.mark.parametrize("header", ["Bearer one", "bearer two", "Bearer  two "])
def test_known_keys_are_admitted(header: str) -> None:
    Access.from_env("KEYS", {"KEYS": "one, two"}, None).check(header, 0.0)


@pytest.mark.parametrize("value", [None, "", " , "])
def test_named_variable_must_hold_keys(value: str | None) -> None:
    environ = {} if value is None else {"KEYS": value}
    with pytest.raises(ValueError, match="KEYS, which holds no keys"):
        Access.from_env("KEYS", environ, None)


def test_rate_is_per_key_and_refills() -> None:
    access = Access.from_env("KEYS", {"KEYS": "one,two"}, 2)
    access.check("Bearer one", 0.0)
    access.check("Bearer one", 0.0)
    with pytest.raises(RateLimited) as refused:
        access.check("Bearer one", 0.0)
    assert refused.value.retry_after_s == pytest.approx(30)
    access.check("Bearer two", 0.0)
    access.check("Bearer one", 30.1)
