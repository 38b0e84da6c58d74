"""Running prompts through a real engine to record which experts they use. Shell: vLLM at the edge.

One engine computes prompt and answer of each request; its connector (capture mode "trace") keeps
the counts of the prompt and of all tokens apart, so that decode counts are their exact difference.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from app.model_facts import model_facts
from calibration.counts import Capture

if TYPE_CHECKING:
    from app.config import EldrConfig


@dataclass(frozen=True, slots=True)
class Prompt:
    """One calibration prompt. `label` is its domain, or its language where it has no domain."""

    id: str
    text: str
    label: str


def read_prompts(path: str | Path, split: str | None = None) -> list[Prompt]:
    """Prompts of a JSON Lines file, or of all `*.jsonl` files in a folder.

    Each line is an object with `prompt`; `id`, `domain`, `language` and `split` are optional.

    Raises:
        FileNotFoundError: there is no such file, or no `*.jsonl` in the folder.
        ValueError: a line is no such object; the message names file and line.
    """
    path = Path(path)
    files = sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
    if not files or not all(file.is_file() for file in files):
        raise FileNotFoundError(f"no prompts at {path}: give a .jsonl file or a folder of them")
    prompts = []
    for file in files:
        # Not splitlines: texts may hold other line separators, which JSON does not escape.
        for number, line in enumerate(file.read_text(encoding="utf-8").split("\n"), start=1):
            if not line:
                continue
            try:
                row = json.loads(line)
                text = row["prompt"]
            except (ValueError, TypeError, KeyError) as err:
                raise ValueError(f"{file}:{number}: not a JSON object with `prompt`") from err
            if split is None or row.get("split") == split:
                domain = row.get("domain") or ""
                label = row.get("language") if domain in ("", "general") else domain
                prompts.append(Prompt(row.get("id", f"{file.stem}-{number}"), text, label or ""))
    return prompts


def sample(prompts: Sequence[Prompt], num: int, seed: int) -> list[Prompt]:
    """At most `num` prompts, the same share of each label as far as they go, in shuffled order.

    Raises:
        ValueError: num is below 1 or there are no prompts.
    """
    if num < 1 or not prompts:
        raise ValueError(f"need at least one prompt, got {len(prompts)} and --num {num}")
    rng = np.random.default_rng(seed)
    queues: dict[str, list[Prompt]] = {}
    for index in rng.permutation(len(prompts)):
        queues.setdefault(prompts[index].label, []).append(prompts[index])
    chosen: list[Prompt] = []
    while len(chosen) < num and any(queues.values()):
        for label in sorted(queues):
            if queues[label] and len(chosen) < num:
                chosen.append(queues[label].pop())
    return [chosen[i] for i in rng.permutation(len(chosen))]


@dataclass(slots=True)
class _Row:
    prompt: Prompt
    prompt_tokens: int
    output_tokens: int
    prompt_counts: np.ndarray[Any, Any]
    total_counts: np.ndarray[Any, Any]


async def capture(
    config: EldrConfig,
    prompts: Sequence[Prompt],
    *,
    max_tokens: int,
    concurrency: int = 16,
    on_done: Callable[[], object] = lambda: None,
) -> Capture:
    """Run prompts through one engine of the configuration's prefill section, greedily.

    Prompts that leave no room for `max_tokens` in the context are cut at the end; answers of fewer
    than two tokens have no decode counts and are left out.

    Raises:
        ValueError: fewer than one usable request.
    """
    facts = model_facts(config.model.path)
    engine = _start_engine(config)
    shape = (facts.num_moe_layers, facts.num_experts)
    limit = asyncio.Semaphore(concurrency)
    try:
        tokenizer = engine.get_tokenizer()
        max_prompt = engine.vllm_config.model_config.max_model_len - max_tokens

        async def one(prompt: Prompt) -> _Row | None:
            async with limit:
                row = await _run(engine, tokenizer, prompt, max_prompt, max_tokens, shape)
            on_done()
            return row

        rows = [r for r in await asyncio.gather(*map(one, prompts)) if r is not None]
        import vllm

        versions = {"vllm": vllm.__version__}
    finally:
        engine.shutdown()
    if not rows:
        raise ValueError("no prompt gave an answer of two tokens or more: raise --max-tokens")
    return _to_capture(rows, config, max_tokens, versions)


def _start_engine(config: EldrConfig) -> Any:
    from deployments.engine import Phase, engine_env, engine_kwargs, resolve_device
    from deployments.replica import set_side_channel

    device = resolve_device(config)
    os.environ.update(engine_env(config, Phase.PREFILL, device))
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    set_side_channel("127.0.0.1", config.kv_transfer.side_channel_port_base)
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    kwargs = engine_kwargs(config, Phase.PREFILL, device, capture="trace")
    return AsyncLLM.from_engine_args(AsyncEngineArgs(model=config.model.path, **kwargs))


async def _run(
    engine: Any,
    tokenizer: Any,
    prompt: Prompt,
    max_prompt: int,
    max_tokens: int,
    shape: tuple[int, int],
) -> _Row | None:
    from vllm import SamplingParams

    from deployments.vllm_adapter.capture import decode_counts
    from deployments.vllm_adapter.connector import COUNTS_KEY, TOTAL_COUNTS_KEY

    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": prompt.text}], add_generation_prompt=True, return_dict=False
    )[-max_prompt:]
    final = None
    params = SamplingParams(max_tokens=max_tokens, temperature=0)
    async for output in engine.generate({"prompt_token_ids": ids}, params, prompt.id):
        final = output
    assert final is not None
    payload = final.kv_transfer_params or {}
    if COUNTS_KEY not in payload or TOTAL_COUNTS_KEY not in payload:
        return None
    prompt_counts, total_counts = (
        decode_counts(base64.b64decode(payload[key]), *shape).astype(np.uint32)
        for key in (COUNTS_KEY, TOTAL_COUNTS_KEY)
    )
    num_output = len(final.outputs[0].token_ids)
    return _Row(prompt, len(ids), num_output, prompt_counts, total_counts)


def _to_capture(
    rows: Sequence[_Row], config: EldrConfig, max_tokens: int, versions: dict[str, str]
) -> Capture:
    facts = model_facts(config.model.path)
    digest = hashlib.sha256()
    for row in rows:
        digest.update(row.prompt.text.encode())
    return Capture(
        model_id=config.model.served_name,
        fingerprint=facts.fingerprint,
        num_layers=facts.num_moe_layers,
        num_experts=facts.num_experts,
        top_k=facts.top_k,
        max_tokens=max_tokens,
        prompts_sha256=digest.hexdigest(),
        versions=versions,
        prefill_counts_NLE=np.stack([r.prompt_counts for r in rows]),
        decode_counts_NLE=np.stack([r.total_counts - r.prompt_counts for r in rows]),
        prompt_tokens_N=np.array([r.prompt_tokens for r in rows], dtype=np.int32),
        # The last sampled token never passes through the experts.
        decode_tokens_N=np.array([r.output_tokens - 1 for r in rows], dtype=np.int32),
        domains_N=np.array([r.prompt.label for r in rows]),
        ids_N=np.array([r.prompt.id for r in rows]),
    )
