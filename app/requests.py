"""Checks of a request's body, before anything is computed for it.

Pure functions: bytes and dicts in, domain errors out. Only what would cost a prefill or harm others
when found late is checked here; all else is left to vLLM, whose answer is passed on.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, Literal, NoReturn

from app.config import EldrConfig, LimitsConfig
from app.errors import BadRequest, BodyTooLarge, UnknownModel

RequestKind = Literal["chat", "completion"]

# Set by us between prefill and decode. From a client they would name KV blocks or encoder outputs
# of somebody else's request on a prefill engine.
INTERNAL_FIELDS = ("kv_transfer_params", "ec_transfer_params")
MAX_TEMPERATURE = 2.0


def parse_body(raw: bytes, limits: LimitsConfig) -> dict[str, Any]:
    """The JSON object in a request body.

    Raises:
        BodyTooLarge: more than `limits.max_body_bytes` bytes.
        BadRequest: not UTF-8, not JSON (NaN, Infinity and 1e999 are not), or not an object.
    """
    if len(raw) > limits.max_body_bytes:
        raise BodyTooLarge(len(raw), limits.max_body_bytes)
    try:
        body = json.loads(
            raw.decode("utf-8"), parse_constant=_refuse_constant, parse_float=_finite_float
        )
    except UnicodeDecodeError as err:
        raise BadRequest(
            "body",
            f"the body is not UTF-8 at byte {err.start}: send JSON in UTF-8",
            code="bad_utf8",
        ) from err
    except json.JSONDecodeError as err:
        raise _bad_json(f"{err.msg} at line {err.lineno}, column {err.colno}") from err
    except RecursionError as err:
        raise _bad_json("it is nested too deeply") from err
    except ValueError as err:
        # An integer of thousands of digits, or one of the constants refused below.
        raise _bad_json(str(err)) from err
    if not isinstance(body, dict):
        raise _bad_json(f"its outermost value must be an object, got {_type_name(body)}")
    _refuse_lone_surrogates(raw, body)
    return body


def validate_chat(body: Mapping[str, Any], config: EldrConfig) -> None:
    """Check a body of /v1/chat/completions.

    Raises:
        BadRequest: a field is missing or out of range; `param` names it.
        UnknownModel: another model than `model.served_name`.
    """
    _check_common(body, config)
    messages = body.get("messages")
    if messages is None:
        _refuse("messages", "is required: give a list of messages", "missing_required_parameter")
    if not isinstance(messages, list) or not messages:
        _refuse("messages", f"must be a list with at least one message, got {_shown(messages)}")
    for index, message in enumerate(messages):
        if not isinstance(message, dict):
            _refuse(f"messages[{index}]", f"must be an object, got {_shown(message)}")
        role = message.get("role")
        if not isinstance(role, str) or not role:
            _refuse(
                f"messages[{index}].role",
                f"must be text such as 'user', 'assistant', 'system' or 'tool', got {_shown(role)}",
            )
    _check_token_limit(body, "max_tokens")
    _check_token_limit(body, "max_completion_tokens")


def validate_completion(body: Mapping[str, Any], config: EldrConfig) -> None:
    """Check a body of /v1/completions.

    Raises:
        BadRequest: a field is missing or out of range; `param` names it.
        UnknownModel: another model than `model.served_name`.
    """
    _check_common(body, config)
    prompt = body.get("prompt")
    if prompt is None and body.get("prompt_embeds") is None:
        _refuse(
            "prompt",
            "is required: give text, a list of texts or token ids",
            "missing_required_parameter",
        )
    if prompt is not None and not isinstance(prompt, str | list):
        _refuse("prompt", f"must be text, a list of texts or token ids, got {_shown(prompt)}")
    if prompt is not None and (not prompt or (isinstance(prompt, list) and [] in prompt)):
        _refuse("prompt", f"must not be empty, got {_shown(prompt)}")
    # 0 with echo scores the prompt and generates nothing.
    _check_token_limit(body, "max_tokens", minimum=0 if body.get("echo") is True else 1)


def needs_local_prefill(body: Mapping[str, Any], kind: RequestKind) -> str | None:
    """Why a valid request cannot take its KV from a prefill engine, or None when it can.

    Such a request is computed as a whole by the decode replica: it has several sequences that would
    each pull the same remote blocks, which the first pull frees, or it wants outputs of prompt
    positions that a decode engine with transferred KV never computes.
    """
    if _above_one(body.get("n")) or _above_one(body.get("best_of")):
        return "n"
    if body.get("use_beam_search"):
        return "beam_search"
    if body.get("prompt_logprobs") is not None:
        return "prompt_logprobs"
    # In vLLM, echo sets prompt_logprobs from (top_)logprobs: for chat always, 0 included.
    if body.get("echo"):
        return "echo"
    if kind == "completion":
        # Token counts of embeddings say nothing of token ids, and the path is untested with NIXL.
        if body.get("prompt_embeds") is not None:
            return "prompt_embeds"
        prompt = body.get("prompt")
        if isinstance(prompt, list) and len(prompt) > 1 and isinstance(prompt[0], str | list):
            return "multiple_prompts"
    return None


def _check_common(body: Mapping[str, Any], config: EldrConfig) -> None:
    model = body.get("model")
    if model is None:
        _refuse(
            "model", f"is required: use {config.model.served_name!r}", "missing_required_parameter"
        )
    if not isinstance(model, str):
        _refuse("model", f"must be text, got {_shown(model)}")
    if model != config.model.served_name:
        raise UnknownModel(model[:200], config.model.served_name)
    _refuse_internal_fields(body)
    n = body.get("n")
    if n is not None and (not _is_int(n) or not 1 <= n <= config.limits.max_n):
        _refuse("n", f"must be an integer in [1, {config.limits.max_n}], got {_shown(n)}")
    _check_number(body, "temperature", 0.0, MAX_TEMPERATURE)
    _check_number(body, "top_p", 0.0, 1.0, low_excluded=True)
    stream = body.get("stream")
    if stream is not None and not isinstance(stream, bool):
        _refuse("stream", f"must be true or false, got {_shown(stream)}")
    stop = body.get("stop")
    stops = [stop] if isinstance(stop, str) else stop
    if stops is not None and (
        not isinstance(stops, list) or not all(isinstance(item, str) and item for item in stops)
    ):
        _refuse("stop", f"must be non-empty text or a list of such texts, got {_shown(stop)}")


def _refuse_internal_fields(body: Mapping[str, Any]) -> None:
    extra = body.get("vllm_xargs")
    for name in INTERNAL_FIELDS:
        if body.get(name) is not None:
            _refuse(name, "is internal to the server: leave it out")
        if isinstance(extra, dict) and name in extra:
            _refuse(f"vllm_xargs.{name}", "is internal to the server: leave it out")


def _check_token_limit(body: Mapping[str, Any], name: str, minimum: int = 1) -> None:
    value = body.get(name)
    if value is not None and (not _is_int(value) or value < minimum):
        _refuse(
            name,
            f"must be an integer >= {minimum}, got {_shown(value)}: leave it out for the default",
        )


def _check_number(
    body: Mapping[str, Any], name: str, low: float, high: float, low_excluded: bool = False
) -> None:
    value = body.get(name)
    if value is None:
        return
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    # Compared as they are: NaN fails both, and an integer of any size needs no conversion.
    if not is_number or not low <= value <= high or (low_excluded and value == low):
        bracket = "(" if low_excluded else "["
        _refuse(name, f"must be a number in {bracket}{low:g}, {high:g}], got {_shown(value)}")


def _refuse(param: str, text: str, code: str = "invalid_value") -> NoReturn:
    raise BadRequest(param, f"{param} {text}", code=code)


def _bad_json(reason: str) -> BadRequest:
    return BadRequest("body", f"the body is not a JSON object: {reason}; send one", code="bad_json")


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _finite_float(literal: str) -> float:
    value = float(literal)
    if not math.isfinite(value):
        raise ValueError(f"the number {literal[:20]} is too large")
    return value


def _refuse_lone_surrogates(raw: bytes, body: dict[str, Any]) -> None:
    """Escapes such as \\ud800 without their other half are JSON, but no text for a tokenizer."""
    if b"\\ud" not in raw and b"\\uD" not in raw:
        return
    try:
        json.dumps(body, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError as err:
        raise _bad_json("it has a \\ud800-\\udfff escape without its other half") from err


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _above_one(value: object) -> bool:
    return isinstance(value, int) and value > 1


def _type_name(value: object) -> str:
    names = {dict: "an object", list: "a list", str: "text", bool: "true or false"}
    return "null" if value is None else names.get(type(value), "a number")


def _shown(value: object) -> str:
    """A value for an error text; texts and containers only by kind, since they may be prompts."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return repr(value) if abs(value) < 1e15 else "a huge number"
    if isinstance(value, str | list | dict) and not value:
        return f"{_type_name(value)} that is empty"
    return _type_name(value)
