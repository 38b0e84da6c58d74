"""The bodies of the two legs of a request: what prefill gets, what decode gets.

Prefill computes the prompt and samples one token that nobody reads: the decode engine computes the
last prompt position again and samples the first token itself. So prefill must see exactly what
shapes the prompt, and nothing that shapes the answer: at best it wastes time there (a grammar is
compiled), at worst vLLM refuses it next to `max_tokens: 1` (`min_tokens`) or breaks the hand-off
(`n`). A field of vLLM's request classes that no table here names makes a test fail.

The fields are those of vLLM 0.32 (`entrypoints/openai/{chat_completion,completion}/protocol.py`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from app.requests import RequestKind


class _Drop:
    """Marks a field that is left out, so that vLLM's default holds."""

    def __repr__(self) -> str:
        return "DROP"


DROP: Final = _Drop()

# What prefill is asked: hand over the KV. vLLM wants all six keys; the answer has them filled.
ASK_FOR_HANDOFF: Final = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}

# What becomes of a field on its way to prefill: DROP, or the value it is set to, given or not.
_COMMON: dict[str, object] = {
    # One answer at once: the reply is a single JSON with kv_transfer_params.
    "stream": DROP,
    "stream_options": DROP,  # refused without stream
    "stream_interval": DROP,
    # One token, from one sequence.
    "min_tokens": DROP,  # refused above max_tokens
    "n": DROP,  # several sequences would share one hand-over
    "best_of": DROP,  # no field of 0.32; older clients send it
    "use_beam_search": DROP,  # runs requests of its own, without KV transfer
    "length_penalty": DROP,  # of beam search
    # Nothing about tokens is read from the answer.
    "logprobs": DROP,
    "top_logprobs": DROP,  # refused without logprobs
    "logprob_token_ids": DROP,  # refused without logprobs
    "prompt_logprobs": DROP,  # switches the prefix cache off
    "echo": DROP,  # sets prompt_logprobs
    "return_tokens_as_token_ids": DROP,
    "return_token_ids": DROP,
    "return_token_offsets": DROP,
    "return_prompt_text": DROP,
    "return_mm_kwargs": DROP,
    "mm_payload": DROP,  # of the render endpoints
    "routed_experts_prompt_start": DROP,
    "skip_special_tokens": DROP,
    "spaces_between_special_tokens": DROP,
    # When to stop: after one token, whichever it is.
    "stop": DROP,
    "stop_token_ids": DROP,
    "include_stop_str_in_output": DROP,
    "ignore_eos": DROP,
    "repetition_detection": DROP,
    "thinking_token_budget": DROP,  # refused by models without a reasoning parser
    # Constraints on the answer: compiling a grammar twice would delay the first token.
    "response_format": DROP,
    "structured_outputs": DROP,
    "guided_json": DROP,  # guided_*: removed before 0.32; older clients send them
    "guided_regex": DROP,
    "guided_choice": DROP,
    "guided_grammar": DROP,
    "guided_decoding_backend": DROP,
    "guided_whitespace_pattern": DROP,
    "allowed_token_ids": DROP,
    "bad_words": DROP,
    "logit_bias": DROP,
    # Penalties look at what was generated and, for repetition, at the prompt: never at its KV.
    "frequency_penalty": DROP,
    "presence_penalty": DROP,
    "repetition_penalty": DROP,
    "watermarking": DROP,
    # Read by logits processors and connectors; the one we use is set below.
    "vllm_xargs": DROP,
    "ec_transfer_params": DROP,
    # The id goes in the X-Request-Id header, which vLLM prefers; a client's own may come twice.
    "request_id": DROP,
    "kv_transfer_params": ASK_FOR_HANDOFF,
}

PREFILL_RULES: dict[RequestKind, dict[str, object]] = {
    "chat": _COMMON
    | {
        # Of the two names the newer wins in vLLM; only it is set.
        "max_completion_tokens": 1,
        "max_tokens": DROP,
        # "auto" is refused by a server without a tool parser, "required" compiles a grammar, and
        # either way one token would be parsed as a call. With "none" vLLM 0.32 still renders
        # `tools` into the prompt (OnlineRenderer.render_chat), unless the server runs with
        # --exclude-tools-when-tool-choice-none: the configuration refuses that flag.
        "tool_choice": "none",
        "parallel_tool_calls": DROP,  # filters parsed calls
        "include_reasoning": DROP,  # filters the answer
    },
    "completion": _COMMON | {"max_tokens": 1, "max_completion_tokens": DROP},
}

# Fields that make the prompt, or where and when it runs: passed on as given.
KEPT_FIELDS: dict[RequestKind, frozenset[str]] = {
    "chat": frozenset(
        {
            "model",
            "messages",
            # Rendered into the prompt.
            "tools",
            "documents",
            "chat_template",
            "chat_template_kwargs",
            "add_generation_prompt",
            "continue_final_message",
            "add_special_tokens",
            "reasoning_effort",  # a variable of chat templates
            "truncate_prompt_tokens",
            "truncation_side",
            "media_io_kwargs",
            "mm_processor_kwargs",
            # Identity of KV blocks, and order in the queue.
            "cache_salt",
            "priority",
            "session_id",
            "user",
            # Sampling of the one token: harmless, and a bad value is refused before decode.
            "seed",
            "temperature",
            "top_p",
            "top_k",
            "min_p",
        }
    ),
    "completion": frozenset(
        {
            "model",
            "prompt",
            "prompt_embeds",
            "suffix",  # rendered by models that fill in the middle
            "add_special_tokens",
            "truncate_prompt_tokens",
            "truncation_side",
            "cache_salt",
            "priority",
            "session_id",
            "user",
            "seed",
            "temperature",
            "top_p",
            "top_k",
            "min_p",
        }
    ),
}

# Renderers that write output fields into the prompt (vLLM 0.32, renderers/kimi_k3.py): for these
# models the fields reach prefill as given, or its prompt would differ from decode's.
_RENDERED_OUTPUT_FIELDS = {"kimi_k3": frozenset({"tool_choice", "response_format"})}


def rendered_output_fields(model_type: str | None) -> frozenset[str]:
    """Fields that prefill must get unchanged for a model, by `model_type` of its config.json."""
    return _RENDERED_OUTPUT_FIELDS.get(model_type or "", frozenset())


def prefill_body(
    body: Mapping[str, Any], kind: RequestKind, keep: frozenset[str] = frozenset()
) -> dict[str, Any]:
    """Body of the prefill leg.

    Args:
        body: the client's body, checked; it is not changed.
        kind: which endpoint it came to.
        keep: fields to pass on in spite of the table; see `rendered_output_fields`.

    Returns:
        A new dict; its values are shared with `body`.
    """
    rules = PREFILL_RULES[kind]
    result = {name: value for name, value in body.items() if name not in rules or name in keep}
    for name, value in rules.items():
        if value is not DROP and name not in keep:
            result[name] = dict(value) if isinstance(value, dict) else value
    return result


def decode_body(body: Mapping[str, Any], kv_transfer_params: Mapping[str, Any] | None) -> bytes:
    """JSON body of the decode leg: the client's own, plus where the KV lies.

    Args:
        body: the client's body, checked; it is not changed.
        kv_transfer_params: those of the prefill answer; None for a request computed locally.
    """
    result = {name: value for name, value in body.items() if name != "kv_transfer_params"}
    if kv_transfer_params is not None:
        result["kv_transfer_params"] = dict(kv_transfer_params)
    return json.dumps(result, separators=(",", ":"), allow_nan=False).encode()
