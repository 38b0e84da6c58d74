"""Checks of request bodies: what is refused, under which field, and what is left to vLLM."""

from __future__ import annotations

import json
from typing import Any

import pytest

from app.config import EldrConfig, LimitsConfig
from app.errors import BadRequest, BodyTooLarge, EldrError, UnknownModel, to_openai
from app.requests import needs_local_prefill, parse_body, validate_chat, validate_completion

CONFIG = EldrConfig.model_validate(
    {
        "model": {"path": "org/name", "served_name": "demo"},
        "router": {"policy": "jsq"},
        "limits": {"max_n": 4},
    }
)
LIMITS = LimitsConfig(max_body_bytes=1024)
MESSAGES = [{"role": "user", "content": "hi"}]


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": "demo", "messages": MESSAGES} | fields


def completion(**fields: Any) -> dict[str, Any]:
    return {"model": "demo", "prompt": "hi"} | fields


def test_parse_body_returns_the_object() -> None:
    assert parse_body('{"a": "é", "b": "\\ud83d\\ude00"}'.encode(), LIMITS) == {
        "a": "é",
        "b": "😀",
    }


@pytest.mark.parametrize(
    ("raw", "error", "text"),
    [
        (b" " * 1025, BodyTooLarge, "1025 bytes"),
        (b'{"a": "\xff"}', BadRequest, "at byte 7"),
        (b'{"a": 1,\n  b}', BadRequest, "line 2, column 3"),
        (b"", BadRequest, "line 1, column 1"),
        (b"[1]", BadRequest, "got a list"),
        (b"null", BadRequest, "got null"),
        (b"3", BadRequest, "got a number"),
        (b'{"t": NaN}', BadRequest, "NaN is not a JSON number"),
        (b'{"t": -Infinity}', BadRequest, "-Infinity is not a JSON number"),
        (b'{"t": 1e999}', BadRequest, "1e999 is too large"),
        (b'{"a": "\\ud800"}', BadRequest, "other half"),
        (b'{"a": "\\uDFFF"}', BadRequest, "other half"),
    ],
)
def test_parse_body_refuses(raw: bytes, error: type[EldrError], text: str) -> None:
    with pytest.raises(error) as info:
        parse_body(raw, LIMITS)
    assert text in info.value.message
    assert info.value.param == "body"


@pytest.mark.parametrize("raw", [b"[" * 200_000, b'{"a": 1' + b"0" * 5000 + b"}"])
def test_parse_body_survives_hostile_json(raw: bytes) -> None:
    with pytest.raises(BadRequest):
        parse_body(raw, LimitsConfig())


BAD_COMMON = [
    ({"model": None}, "model", "'demo'"),
    ({"model": 3}, "model", "got 3"),
    ({"n": 0}, "n", "in [1, 4], got 0"),
    ({"n": 5}, "n", "in [1, 4], got 5"),
    ({"n": True}, "n", "got true"),
    ({"n": "2"}, "n", "got text"),
    ({"max_tokens": 0}, "max_tokens", ">= 1, got 0"),
    ({"max_tokens": -1}, "max_tokens", ">= 1, got -1"),
    ({"max_tokens": 1.5}, "max_tokens", "got 1.5"),
    ({"max_tokens": True}, "max_tokens", "got true"),
    ({"temperature": -0.1}, "temperature", "[0, 2], got -0.1"),
    ({"temperature": 2.1}, "temperature", "[0, 2], got 2.1"),
    ({"temperature": "1"}, "temperature", "got text"),
    ({"temperature": False}, "temperature", "got false"),
    ({"temperature": 10**400}, "temperature", "a huge number"),
    ({"temperature": float("nan")}, "temperature", "[0, 2]"),
    ({"temperature": float("inf")}, "temperature", "[0, 2]"),
    ({"top_p": 0}, "top_p", "(0, 1], got 0"),
    ({"top_p": 1.1}, "top_p", "(0, 1], got 1.1"),
    ({"stream": "true"}, "stream", "true or false"),
    ({"stream": 1}, "stream", "got 1"),
    ({"stop": 3}, "stop", "list of such texts"),
    ({"stop": ["a", 3]}, "stop", "list of such texts"),
    ({"stop": ""}, "stop", "non-empty"),
    ({"stop": ["a", ""]}, "stop", "non-empty"),
    ({"kv_transfer_params": {}}, "kv_transfer_params", "leave it out"),
    ({"kv_transfer_params": {"remote_host": "x"}}, "kv_transfer_params", "leave it out"),
    ({"ec_transfer_params": {"a": 1}}, "ec_transfer_params", "leave it out"),
    (
        {"vllm_xargs": {"kv_transfer_params": "x"}},
        "vllm_xargs.kv_transfer_params",
        "leave it out",
    ),
]
BAD_CHAT = [
    *BAD_COMMON,
    ({"messages": None}, "messages", "is required"),
    ({"messages": []}, "messages", "at least one message"),
    ({"messages": "hi"}, "messages", "at least one message"),
    ({"messages": ["hi"]}, "messages[0]", "an object"),
    ({"messages": [*MESSAGES, {"content": "x"}]}, "messages[1].role", "'user'"),
    ({"messages": [{"role": 3}]}, "messages[0].role", "got 3"),
    ({"max_completion_tokens": 0}, "max_completion_tokens", ">= 1, got 0"),
]
BAD_COMPLETION = [
    *BAD_COMMON,
    ({"prompt": None}, "prompt", "is required"),
    ({"prompt": ""}, "prompt", "must not be empty"),
    ({"prompt": []}, "prompt", "must not be empty"),
    ({"prompt": [[1], []]}, "prompt", "must not be empty"),
    ({"prompt": 3}, "prompt", "token ids, got 3"),
    ({"prompt": {"a": 1}}, "prompt", "got an object"),
]


def check_refused(check: Any, body: dict[str, Any], param: str, text: str) -> None:
    with pytest.raises(BadRequest) as info:
        check(body, CONFIG)
    assert info.value.param == param
    assert info.value.message.startswith(param)
    assert text in info.value.message
    assert to_openai(info.value)[0] == 400


@pytest.mark.parametrize(("fields", "param", "text"), BAD_CHAT)
def test_bad_chat_is_refused(fields: dict[str, Any], param: str, text: str) -> None:
    check_refused(validate_chat, chat(**fields), param, text)


@pytest.mark.parametrize(("fields", "param", "text"), BAD_COMPLETION)
def test_bad_completion_is_refused(fields: dict[str, Any], param: str, text: str) -> None:
    check_refused(validate_completion, completion(**fields), param, text)


def test_error_texts_never_quote_a_prompt() -> None:
    for body in (
        completion(prompt={"text": "secret"}),
        completion(prompt="", stop="secret", n="secret"),
        chat(messages="secret"),
    ):
        for check in (validate_chat, validate_completion):
            with pytest.raises(BadRequest) as info:
                check(body, CONFIG)
            assert "secret" not in info.value.message


def test_unknown_model_names_the_one_that_is_served() -> None:
    for check, body in ((validate_chat, chat), (validate_completion, completion)):
        with pytest.raises(UnknownModel, match=r"'gpt-4'.*'demo'"):
            check(body(model="gpt-4"), CONFIG)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"n": 4, "max_tokens": 1, "temperature": 0, "top_p": 1, "stream": True, "stop": "x"},
        {"n": None, "max_tokens": None, "temperature": None, "stream": None, "stop": None},
        {"stop": ["a", "b"], "temperature": 2.0, "kv_transfer_params": None, "unknown": 1},
        {"vllm_xargs": {"other": 1}, "logit_bias": "left to vLLM"},
    ],
)
def test_good_bodies_pass(fields: dict[str, Any]) -> None:
    validate_chat(chat(**fields), CONFIG)
    validate_completion(completion(**fields), CONFIG)


@pytest.mark.parametrize("prompt", ["a", ["a"], ["a", "b"], [1, 2], [[1], [2, 3]]])
def test_all_prompt_forms_pass(prompt: Any) -> None:
    validate_completion(completion(prompt=prompt), CONFIG)


def test_embeddings_stand_in_for_a_prompt_and_echo_allows_no_tokens() -> None:
    validate_completion({"model": "demo", "prompt_embeds": "AAAA"}, CONFIG)
    validate_completion(completion(echo=True, max_tokens=0), CONFIG)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({}, None),
        ({"n": 1, "best_of": 1, "echo": False, "use_beam_search": False}, None),
        ({"n": None, "prompt_logprobs": None, "logprobs": 3}, None),
        ({"n": 2}, "n"),
        ({"best_of": 3}, "n"),
        ({"use_beam_search": True}, "beam_search"),
        ({"use_beam_search": True, "n": 1}, "beam_search"),
        ({"prompt_logprobs": 0}, "prompt_logprobs"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"echo": True}, "echo"),
    ],
)
def test_local_prefill_reasons_of_both_kinds(fields: dict[str, Any], reason: str | None) -> None:
    assert needs_local_prefill(chat(**fields), "chat") == reason
    assert needs_local_prefill(completion(**fields), "completion") == reason


@pytest.mark.parametrize(
    ("prompt", "reason"),
    [
        ("a", None),
        (["a"], None),
        ([1, 2, 3], None),
        ([[1, 2]], None),
        (["a", "b"], "multiple_prompts"),
        ([[1], [2]], "multiple_prompts"),
    ],
)
def test_local_prefill_for_several_prompts(prompt: Any, reason: str | None) -> None:
    assert needs_local_prefill(completion(prompt=prompt), "completion") == reason


def test_local_prefill_for_embeddings() -> None:
    assert needs_local_prefill(completion(prompt_embeds="AAAA"), "completion") == "prompt_embeds"


def test_checks_leave_the_body_alone() -> None:
    body = chat(n=2, tools=[{"type": "function", "function": {"name": "f"}}])
    before = json.dumps(body)
    validate_chat(body, CONFIG)
    needs_local_prefill(body, "chat")
    assert json.dumps(body) == before
