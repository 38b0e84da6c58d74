"""`eldr bench capture`: what counting expert choices adds to the time of a prefill.

Two equal prefill engines, one that counts and one that does not, compute the same fresh prompts
one at a time, in the order on, off, off, on, and so on: a drift of the machine hits both alike.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from app.config import EldrConfig, KvTransferConfig, ModelConfig, PrefillConfig, RouterConfig
from app.prefill_request import ASK_FOR_HANDOFF
from bench.engines import start_engine
from bench.peers import free_ports
from bench.report import Spread, progress_line, stdout_to_stderr
from deployments.engine import Phase, resolve_device

DEFAULT_MODEL = Path("build/demo-model")
PROMPTS_PER_ROUND = 14
PROMPT_TOKENS = (300, 500)
NUM_WARM_UP = 6
TARGET = 1.03
SIDES = {"on": "prefill", "off": "off"}  # side: `eldr_capture` of its engine
# KV of answered prefills stays in the engine until its lease ends: nobody will fetch it.
LEASE_S = 5.0

Times = dict[str, list[float]]


def add_cli(subparsers: Any) -> None:
    """Register `capture` among the sub-parsers of `eldr bench`."""
    parser = subparsers.add_parser("capture", help="cost of expert capture in prefill (minutes)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--model", type=Path, default=DEFAULT_MODEL, help="model folder (default %(default)s)"
    )
    parser.add_argument(
        "--rounds",
        type=int,
        default=15,
        help=f"rounds of {PROMPTS_PER_ROUND} prompts a side (default %(default)s)",
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of the prompts (default %(default)s)"
    )
    parser.set_defaults(func=_command)


def _command(args: argparse.Namespace) -> int:
    if args.rounds < 1:
        raise ValueError("--rounds must be >= 1")
    if not (args.model / "config.json").is_file():
        raise ValueError(
            f"no model in {args.model}: run `eldr demo-model unpack`, or give --model DIR"
        )
    with stdout_to_stderr():
        report = asyncio.run(measure(args.model, args.rounds, args.seed, progress_line()))
        gc.collect()
    print(json.dumps(report) if args.json else _text(report, args.rounds))
    return 0


async def measure(
    model: Path, rounds: int, seed: int, progress: Callable[[str], None]
) -> dict[str, float]:
    """Start both engines, time the prompts, end the engines.

    Returns:
        `make_report`'s figures.
    """
    config = bench_config(model)
    with ExitStack() as stack:
        engines: dict[str, Any] = {}
        # One that is left to the interpreter's end complains there.
        stack.callback(engines.clear)
        for (side, mode), port in zip(SIDES.items(), free_ports(2), strict=True):
            progress(f"starting the engine with capture {side}")
            engines[side] = start_engine(config, Phase.PREFILL, port, capture=mode)
            stack.callback(engines[side].shutdown)
        vocab_size = engines["on"].model_config.get_vocab_size()
        rng = np.random.default_rng(seed)
        await _round(engines, make_prompts(rng, vocab_size, NUM_WARM_UP), "warm-up")
        results = []
        for i in range(rounds):
            prompts = make_prompts(rng, vocab_size, PROMPTS_PER_ROUND)
            times = await _round(engines, prompts, f"round {i}")
            results.append(times)
            progress(
                f"round {i + 1}/{rounds}  on {median(times['on']) * 1e3:.2f} ms  "
                f"off {median(times['off']) * 1e3:.2f} ms  ratio {round_ratio(times):.3f}"
            )
    return make_report(results)


def bench_config(model: Path) -> EldrConfig:
    """An application whose prefill engine is measured."""
    base = EldrConfig(
        model=ModelConfig(path=str(model.resolve()), served_name="bench"),
        router=RouterConfig(policy="jsq"),
        kv_transfer=KvTransferConfig(lease_s=LEASE_S),
    )
    if resolve_device(base) == "gpu":
        return base
    return base.model_copy(update={"prefill": PrefillConfig(kv_cache_gib=1)})


def make_prompts(rng: np.random.Generator, vocab_size: int, number: int) -> list[list[int]]:
    """Random token ids, so that no prefix cache has seen them."""
    lengths = rng.integers(*PROMPT_TOKENS, size=number, endpoint=True)
    return [rng.integers(vocab_size, size=length).tolist() for length in lengths]


def sides_in_order(index: int) -> list[str]:
    """Which engine computes a prompt first: on, off for even prompts, off, on for odd ones."""
    return list(SIDES) if index % 2 == 0 else list(SIDES)[::-1]


def round_ratio(times: Times) -> float:
    """Median over a round's prompts of on / off: both computed the same prompt."""
    return median(a / b for a, b in zip(times["on"], times["off"], strict=True))


def make_report(rounds: list[Times]) -> dict[str, float]:
    """Figures over rounds.

    Args:
        rounds: seconds of each prompt, by side.

    Returns:
        ratio_p50, ratio_lo, ratio_hi: median, least and greatest of the rounds' ratios; on_ms,
        off_ms: median time of a prefill over all prompts.
    """
    ratio = Spread.of([round_ratio(times) for times in rounds])
    all_ms = {side: median(t for times in rounds for t in times[side]) * 1e3 for side in SIDES}
    return {
        "ratio_p50": round(ratio.median, 4),
        "ratio_lo": round(ratio.lo, 4),
        "ratio_hi": round(ratio.hi, 4),
        "on_ms": round(all_ms["on"], 3),
        "off_ms": round(all_ms["off"], 3),
    }


async def _round(engines: Mapping[str, Any], prompts: list[list[int]], tag: str) -> Times:
    times: Times = {side: [] for side in SIDES}
    for i, prompt in enumerate(prompts):
        for side in sides_in_order(i):
            times[side].append(await _prefill(engines[side], prompt, f"{tag} {i}"))
    return times


async def _prefill(engine: Any, prompt: list[int], request_id: str) -> float:
    """Seconds that one prefill takes, from the request to its one token."""
    from vllm import SamplingParams

    params = SamplingParams(
        max_tokens=1,
        temperature=0,
        ignore_eos=True,
        detokenize=False,
        extra_args={"kv_transfer_params": dict(ASK_FOR_HANDOFF)},
    )
    started = time.perf_counter()
    async for _ in engine.generate({"prompt_token_ids": prompt}, params, request_id):
        pass
    return time.perf_counter() - started


def _text(report: dict[str, float], rounds: int) -> str:
    verdict = "ok" if report["ratio_p50"] <= TARGET else "missed"
    return (
        f"prefill of {PROMPT_TOKENS[0]}-{PROMPT_TOKENS[1]} fresh tokens, "
        f"{rounds * PROMPTS_PER_ROUND} prompts a side, {rounds} rounds\n"
        f"capture on   {report['on_ms']:8.2f} ms p50\n"
        f"capture off  {report['off_ms']:8.2f} ms p50\n"
        f"on / off     {report['ratio_p50']:8.3f} "
        f"({report['ratio_lo']:.3f}..{report['ratio_hi']:.3f})  target <= {TARGET:g}  {verdict}"
    )
