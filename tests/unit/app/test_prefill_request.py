"""The sanitiser of the prefill leg, field by field and against the installed vLLM's own fields."""

from __future__ import annotations

import ast
import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from app.prefill_request import (
    DROP,
    KEPT_FIELDS,
    PREFILL_RULES,
    decode_body,
    prefill_body,
    rendered_output_fields,
)
from app.requests import RequestKind

KINDS: tuple[RequestKind, ...] = ("chat", "completion")
HAND_OVER = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
CHAT = {"model": "demo", "messages": [{"role": "user", "content": "hi"}]}
COMPLETION = {"model": "demo", "prompt": "hi"}

# Names that vLLM 0.32 does not know (or not for this kind) and clients still send.
FOREIGN = {
    "best_of",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "guided_decoding_backend",
    "guided_whitespace_pattern",
    "max_completion_tokens",
    "top_logprobs",
    "return_prompt_text",
}


def vllm_fields(kind: RequestKind) -> set[str]:
    """Fields of vLLM's request class, read from its source: importing vLLM takes seconds."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("vLLM is not installed")
    folder, cls = {
        "chat": ("chat_completion", "ChatCompletionRequest"),
        "completion": ("completion", "CompletionRequest"),
    }[kind]
    root = Path(next(iter(spec.submodule_search_locations)))
    tree = ast.parse((root / "entrypoints" / "openai" / folder / "protocol.py").read_text())
    (node,) = (n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == cls)
    return {
        item.target.id
        for item in node.body
        if isinstance(item, ast.AnnAssign)
        and isinstance(item.target, ast.Name)
        and not item.target.id.startswith("_")
    }


@pytest.mark.parametrize("kind", KINDS)
def test_every_field_of_vllm_is_either_kept_or_ruled(kind: RequestKind) -> None:
    fields, ruled, kept = vllm_fields(kind), set(PREFILL_RULES[kind]), KEPT_FIELDS[kind]
    assert len(fields) > 40
    assert not ruled & kept, "a field is in both tables"
    assert not fields - ruled - kept, "new in vLLM: decide whether it shapes the prompt"
    assert not kept - fields, "gone from vLLM: remove it from KEPT_FIELDS"
    assert ruled - fields <= FOREIGN, "gone from vLLM: remove it from PREFILL_RULES"


@pytest.mark.parametrize(
    ("kind", "field"),
    [(kind, name) for kind in KINDS for name, rule in PREFILL_RULES[kind].items() if rule is DROP],
)
def test_dropped_fields_do_not_reach_prefill(kind: RequestKind, field: str) -> None:
    assert field not in prefill_body({"model": "demo", field: "given"}, kind)


@pytest.mark.parametrize(
    ("kind", "field"), [(kind, name) for kind in KINDS for name in sorted(KEPT_FIELDS[kind])]
)
def test_fields_of_the_prompt_reach_prefill_unchanged(kind: RequestKind, field: str) -> None:
    marker = object()
    assert prefill_body({field: marker}, kind)[field] is marker


def test_unknown_fields_are_passed_on_as_vllm_ignores_them() -> None:
    assert prefill_body(CHAT | {"x_new": 1}, "chat")["x_new"] == 1


def test_chat_body() -> None:
    body = CHAT | {
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": 50,
        "max_completion_tokens": 60,
        "min_tokens": 5,
        "tools": TOOLS,
        "tool_choice": "required",
        "temperature": 0.3,
        "cache_salt": "s",
    }
    before = json.dumps(body)
    assert prefill_body(body, "chat") == CHAT | {
        "tools": TOOLS,
        "tool_choice": "none",
        "temperature": 0.3,
        "cache_salt": "s",
        "max_completion_tokens": 1,
        "kv_transfer_params": HAND_OVER,
    }
    assert json.dumps(body) == before


def test_completion_body() -> None:
    body = COMPLETION | {"max_tokens": 50, "n": 3, "stop": ["x"], "echo": True, "suffix": "s"}
    assert prefill_body(body, "completion") == COMPLETION | {
        "suffix": "s",
        "max_tokens": 1,
        "kv_transfer_params": HAND_OVER,
    }


@pytest.mark.parametrize("kind", KINDS)
def test_one_token_is_asked_for_under_one_name_and_given_params_are_replaced(
    kind: RequestKind,
) -> None:
    body = prefill_body({"kv_transfer_params": {"remote_host": "evil"}}, kind)
    assert [body[name] for name in ("max_tokens", "max_completion_tokens") if name in body] == [1]
    assert body["kv_transfer_params"] == HAND_OVER


def test_bodies_do_not_share_the_hand_over() -> None:
    prefill_body(CHAT, "chat")["kv_transfer_params"]["remote_host"] = "changed"
    assert prefill_body(CHAT, "chat")["kv_transfer_params"] == HAND_OVER


def test_models_that_render_output_fields_get_them_as_given() -> None:
    keep = rendered_output_fields("kimi_k3")
    body = CHAT | {"tools": TOOLS, "tool_choice": "required", "response_format": {"type": "text"}}
    result = prefill_body(body, "chat", keep)
    assert result["tool_choice"] == "required"
    assert result["response_format"] == {"type": "text"}
    # Without a choice the default must stay the same on both legs.
    assert "tool_choice" not in prefill_body(CHAT | {"tools": TOOLS}, "chat", keep)
    assert rendered_output_fields("qwen3_moe") == rendered_output_fields(None) == frozenset()


def test_decode_body_is_the_clients_own_plus_the_params() -> None:
    body: dict[str, Any] = CHAT | {"stream": True, "min_tokens": 3, "seed": 1, "user": "é"}
    params = {"do_remote_prefill": True, "remote_block_ids": [[1, 2]], "remote_host": "h"}
    assert json.loads(decode_body(body, params)) == body | {"kv_transfer_params": params}
    assert "kv_transfer_params" not in body


def test_decode_body_without_hand_over_has_no_params() -> None:
    assert json.loads(decode_body(CHAT | {"kv_transfer_params": None}, None)) == CHAT
