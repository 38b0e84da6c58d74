"""The error table: every type has a row, and no text of a bug reaches a client."""

from __future__ import annotations

import json

import pytest

from app import errors

CASES = [
    (errors.BadRequest("n", "n must be >= 1, got 0"), 400, "invalid_value", "n"),
    (errors.BadRequest("x", "no", status=422, code="odd"), 422, "odd", "x"),
    (errors.UnknownModel("gpt", "demo"), 404, "model_not_found", "model"),
    (errors.BodyTooLarge(11, 10), 413, "body_too_large", "body"),
    (errors.Unauthorized(), 401, "invalid_api_key", None),
    (errors.RateLimited(60, 2.5), 429, "rate_limit_exceeded", None),
    (errors.NoPrefillReplica("none"), 503, "no_prefill_replica", None),
    (errors.NoDecodeReplica("none"), 503, "no_decode_replica", None),
    (errors.PrefillFailed("died"), 502, "prefill_failed", None),
    (errors.DecodeFailed("died"), 502, "decode_failed", None),
    (errors.DeadlineExceeded("late"), 504, "deadline_exceeded", None),
]


@pytest.mark.parametrize(("error", "status", "code", "param"), CASES)
def test_each_type_has_its_status_and_openai_body(
    error: errors.EldrError, status: int, code: str, param: str | None
) -> None:
    got_status, body = errors.to_openai(error)
    assert got_status == status
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert (body["error"]["code"], body["error"]["param"]) == (code, param)
    assert body["error"]["message"] == error.message == str(error)


def test_every_error_type_is_tested_and_in_the_table() -> None:
    types = set(errors.EldrError.__subclasses__())
    assert types == set(errors.ERROR_TABLE) == {type(case[0]) for case in CASES}


def test_a_subclass_takes_the_row_of_its_parent() -> None:
    class EngineDied(errors.DecodeFailed):
        pass

    assert errors.to_openai(EngineDied("gone"))[0] == 502


@pytest.mark.parametrize("error", [KeyError("secret prompt"), errors.EldrError("secret prompt")])
def test_unknown_errors_become_500_without_their_text(error: Exception) -> None:
    status, body = errors.to_openai(error)
    assert (status, body["error"]["code"]) == (500, "internal_error")
    assert "secret" not in json.dumps(body)


def test_sse_event_is_one_data_line_without_done() -> None:
    event = errors.to_sse(errors.DecodeFailed("two\nlines"))
    assert event.startswith(b"data: {")
    assert event.endswith(b"}\n\n")
    assert event.count(b"\n") == 2
    assert b"[DONE]" not in event
    assert json.loads(event.removeprefix(b"data: "))["error"]["code"] == "decode_failed"


def test_headers_say_when_to_retry_and_how_to_authenticate() -> None:
    assert errors.response_headers(errors.RateLimited(60, 2.5)) == {"Retry-After": "3"}
    assert errors.response_headers(errors.NoDecodeReplica("x", retry_after_s=0.1)) == {
        "Retry-After": "1"
    }
    assert errors.response_headers(errors.Unauthorized()) == {"WWW-Authenticate": "Bearer"}
    assert errors.response_headers(ValueError("x")) == {}


def test_messages_say_value_and_remedy() -> None:
    assert "'gpt'" in str(errors.UnknownModel("gpt", "demo"))
    assert "'demo'" in str(errors.UnknownModel("gpt", "demo"))
    assert "retry in 3 s" in str(errors.RateLimited(60, 2.5))
