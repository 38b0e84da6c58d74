"""`eldr bench step-time`: time of a decode step by batch and distinct experts, on a real engine.

A decode engine with expert capture decodes batches of several sizes, made of requests of one
domain or of all. Each batch gives one row: requests, distinct experts of a step (mean over layers
and steps) and the median time of a step. Non-negative least squares gives the coefficients of
`StepTimeLaw`, which `eldr simulate` reads (step_time.law: file).

How to read R squared: batch and distinct experts rise together, so a law of the batch alone
explains nearly as much. What experts explain shows among batches of the same size:
`r_squared_within` is the law's share of the variance left when each size's mean is taken away. It
is near 0 where experts are so small that reading one costs no measurable time, as with the demo
model (110 KB) on a CPU; then `per_distinct` is not worth using. `--widen` adds zero columns to
every expert: the function is the same, the bytes are those of a larger model.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import itertools
import json
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from app.config import DecodeConfig, EldrConfig, ModelConfig, RouterConfig
from bench.engines import start_engine
from bench.peers import free_ports
from bench.report import progress_line, stdout_to_stderr, table
from calibration.capture import read_prompts
from calibration.step_time import StepTimeLaw, fit_step_time
from deployments.engine import Phase, resolve_device

DEFAULT_MODEL = Path("build/demo-model")
DEFAULT_PROMPTS = Path("data/prompts")
GROUPS = {
    "tasks": ("code", "math", "medical", "legal"),
    "languages": ("en", "zh", "ru", "fr"),
}
BATCHES = (1, 2, 4, 8, 16, 32)
DECODE_TOKENS = 40
MAX_PROMPT_TOKENS = 96


@dataclass(frozen=True, slots=True)
class Row:
    """One batch.

    Attributes:
        batch: requests, mean over the measured steps.
        distinct: distinct experts of a step, mean over layers and steps.
        seconds: median time of a step.
        mix: which requests: a domain, or "mixed tasks" or "mixed languages".
    """

    batch: float
    distinct: float
    seconds: float
    mix: str


def add_cli(subparsers: Any) -> None:
    """Register `step-time` among the sub-parsers of `eldr bench`."""
    parser = subparsers.add_parser(
        "step-time", help="decode step by batch and distinct experts (minutes)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--model", type=Path, default=DEFAULT_MODEL, help="model folder (default %(default)s)"
    )
    parser.add_argument(
        "--prompts", type=Path, default=DEFAULT_PROMPTS, help="prompts (default %(default)s)"
    )
    parser.add_argument(
        "--rounds", type=int, default=3, help="batches of each size and mix (default %(default)s)"
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of prompts and order (default %(default)s)"
    )
    parser.add_argument(
        "--widen",
        type=int,
        metavar="WIDTH",
        help="give every expert this many columns, the new ones zero (default: as it is)",
    )
    parser.set_defaults(func=_command)


def _command(args: argparse.Namespace) -> int:
    if args.rounds < 1:
        raise ValueError(f"--rounds must be >= 1, got {args.rounds}")
    if not (args.model / "config.json").is_file():
        raise ValueError(
            f"no model in {args.model}: run `eldr demo-model unpack`, or give --model DIR"
        )
    with stdout_to_stderr(), tempfile.TemporaryDirectory(prefix="eldr-bench-") as folder:
        model = args.model
        if args.widen is not None:
            model = widen_experts(args.model, Path(folder) / "wide", args.widen)
        rows = asyncio.run(measure(model, args.prompts, args.rounds, args.seed, progress_line()))
        gc.collect()
    report = {**make_report(rows), "expert_bytes": expert_bytes(args.model, args.widen)}
    print(json.dumps(report) if args.json else _text(report))
    return 0


async def measure(
    model: Path, prompts: Path, rounds: int, seed: int, progress: Callable[[str], None]
) -> list[Row]:
    """Start the engine, decode the batches in drawn order, end the engine."""
    config = bench_config(model)
    rng = np.random.default_rng(seed)
    with ExitStack() as stack:
        engines: list[Any] = []
        # One that is left to the interpreter's end complains there.
        stack.callback(engines.clear)
        progress("starting a decode engine")
        engines.append(start_engine(config, Phase.DECODE, free_ports(1)[0]))
        stack.callback(engines[0].shutdown)
        pools = _token_pools(engines[0].get_tokenizer(), prompts)
        plan = make_plan(rounds, rng)
        await _decode(engines[0], draw_prompts(pools, "mixed tasks", 8, rng), "warm-up")
        rows: list[Row] = []
        for i, (batch, mix) in enumerate(plan):
            chosen = draw_prompts(pools, mix, batch, rng)
            rows.append(Row(*await _decode(engines[0], chosen, str(i)), mix))
            progress(
                f"{i + 1}/{len(plan)}  {mix:<16} batch {batch:2d}  distinct "
                f"{rows[-1].distinct:5.1f}  {rows[-1].seconds * 1e3:6.2f} ms"
            )
    return rows


def bench_config(model: Path) -> EldrConfig:
    """An application whose decode engine is measured."""
    base = EldrConfig(
        model=ModelConfig(path=str(model.resolve()), served_name="bench", max_model_len=1024),
        decode=DecodeConfig(max_num_seqs=max(BATCHES), enable_prefix_caching=False),
        router=RouterConfig(policy="jsq"),
    )
    if resolve_device(base) == "gpu":
        return base
    decode = base.decode.model_copy(update={"kv_cache_gib": 1})
    return base.model_copy(update={"decode": decode})


def make_plan(rounds: int, rng: np.random.Generator) -> list[tuple[int, str]]:
    """Batches to run, as (requests, mix), in drawn order: a drift of the machine hits all alike."""
    mixes = [mix for group, domains in GROUPS.items() for mix in (*domains[:2], f"mixed {group}")]
    plan = [(batch, mix) for batch in BATCHES for mix in mixes for _ in range(rounds)]
    return [plan[i] for i in rng.permutation(len(plan))]


def draw_prompts(
    pools: dict[str, list[list[int]]], mix: str, number: int, rng: np.random.Generator
) -> list[list[int]]:
    """Prompts of a batch: of one domain, or of a group's domains in turn."""
    domains = GROUPS[mix.removeprefix("mixed ")] if mix.startswith("mixed ") else (mix,)
    in_turn = [pools[domain] for domain in itertools.islice(itertools.cycle(domains), number)]
    return [pool[int(rng.integers(len(pool)))] for pool in in_turn]


def make_report(rows: Sequence[Row]) -> dict[str, Any]:
    """Coefficients and how well they fit.

    Returns:
        law_s: coefficients in seconds; r_squared of the law; r_squared_batch of a law of the batch
        alone; r_squared_within: share of the variance within batch sizes that the law explains,
        may be below 0; sizes: mean distinct and step time by batch size, one-domain and mixed.
    """
    batch, distinct, seconds = (
        np.array([getattr(row, name) for row in rows]) for name in ("batch", "distinct", "seconds")
    )
    zeros = np.zeros_like(batch)
    law, r_squared = fit_step_time(batch, distinct, zeros, seconds)
    _, r_squared_batch = fit_step_time(batch, zeros, zeros, seconds)
    sizes = np.rint(batch).astype(int)
    predicted = np.array([law(b, d) for b, d in zip(batch, distinct, strict=True)])
    own, fitted = _centred(seconds, sizes), _centred(predicted, sizes)
    spread = float((own**2).sum())
    within = 1 - float(((own - fitted) ** 2).sum()) / spread if spread > 0 else 0.0
    return {
        "law_s": {name: getattr(law, name) for name in StepTimeLaw.__slots__},
        "r_squared": round(r_squared, 4),
        "r_squared_batch": round(r_squared_batch, 4),
        "r_squared_within": round(within, 4),
        "num_batches": len(rows),
        "sizes": {
            str(size): _size_figures([r for r, s in zip(rows, sizes, strict=True) if s == size])
            for size in np.unique(sizes)
        },
    }


def _centred(values: np.ndarray[Any, Any], sizes: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Values less the mean of their batch size."""
    centred = values.astype(np.float64)
    for size in np.unique(sizes):
        centred[sizes == size] -= centred[sizes == size].mean()
    return centred


def _size_figures(rows: Sequence[Row]) -> dict[str, float]:
    figures = {}
    for name, chosen in (
        ("one", [row for row in rows if not row.mix.startswith("mixed")]),
        ("mixed", [row for row in rows if row.mix.startswith("mixed")]),
    ):
        if chosen:
            figures[f"{name}_distinct"] = round(float(np.mean([r.distinct for r in chosen])), 2)
            figures[f"{name}_ms"] = round(median(r.seconds for r in chosen) * 1e3, 3)
    return figures


def expert_bytes(model: Path, width: int | None) -> int:
    """Bytes of one expert of one layer, in 16-bit weights."""
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    columns = config["moe_intermediate_size"] if width is None else width
    return int(3 * config["hidden_size"] * columns * 2)


def widen_experts(model: Path, out: Path, width: int) -> Path:
    """Copy a model whose experts get more columns, all zero: same function, more bytes.

    Args:
        model: folder with one safetensors file, experts as `...experts.N.{gate,up,down}_proj`.
        out: folder to make.
        width: columns of each expert.

    Raises:
        ValueError: the width is not above what the experts have.
    """
    import torch
    from safetensors.torch import load_file, save_file

    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    own = config["moe_intermediate_size"]
    if width <= own:
        raise ValueError(f"--widen must be above the {own} columns that experts have, got {width}")
    shutil.copytree(model, out, ignore=shutil.ignore_patterns("*.safetensors"))
    tensors = load_file(model / "model.safetensors")
    for name, tensor in tensors.items():
        if ".experts." in name:
            is_down = name.endswith("down_proj.weight")
            shape = (tensor.shape[0], width) if is_down else (width, tensor.shape[1])
            wide = torch.zeros(shape, dtype=tensor.dtype)
            wide[: tensor.shape[0], : tensor.shape[1]] = tensor
            tensors[name] = wide
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    config["moe_intermediate_size"] = width
    (out / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return out


def _token_pools(tokenizer: Any, prompts: Path) -> dict[str, list[list[int]]]:
    """Token ids of the test prompts in chat form, cut, by label."""
    pools: dict[str, list[list[int]]] = {
        domain: [] for domains in GROUPS.values() for domain in domains
    }
    for prompt in read_prompts(prompts, "test"):
        pool = pools.get(prompt.label)
        if pool is not None and len(pool) < 200:
            ids = tokenizer.apply_chat_template(
                [{"role": "user", "content": prompt.text[:2000]}],
                add_generation_prompt=True,
                return_dict=False,
            )
            pool.append(ids[-MAX_PROMPT_TOKENS:])
    if missing := [domain for domain, pool in pools.items() if not pool]:
        raise ValueError(f"{prompts} has no test prompts labelled {', '.join(missing)}")
    return pools


async def _decode(
    engine: Any, prompts: Sequence[list[int]], tag: str
) -> tuple[float, float, float]:
    """Batch, distinct experts and median seconds of the steps in which all prompts decode."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    params = SamplingParams(
        max_tokens=DECODE_TOKENS,
        temperature=0,
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )
    started, waiting = asyncio.Event(), len(prompts)
    arrivals: list[list[float]] = [[] for _ in prompts]

    async def one(i: int, prompt: list[int]) -> None:
        nonlocal waiting
        async for _ in engine.generate({"prompt_token_ids": prompt}, params, f"{tag} {i}"):
            arrivals[i].append(time.perf_counter())
            if len(arrivals[i]) == 2:
                waiting -= 1
                if not waiting:
                    started.set()

    async def totals_once_all_decode() -> dict[str, Any]:
        await started.wait()
        return await _totals(engine)

    before, *_ = await asyncio.gather(
        totals_once_all_decode(), *(one(i, prompt) for i, prompt in enumerate(prompts))
    )
    after = await _totals(engine)
    begin = max(times[1] for times in arrivals)
    end = min(times[-1] for times in arrivals)
    gaps = [
        b - a for times in arrivals for a, b in itertools.pairwise(times) if begin <= a and b <= end
    ]
    steps = after["num_steps"] - before["num_steps"]
    distinct = np.subtract(after["distinct_L"], before["distinct_L"]).mean() / steps
    return len(prompts), float(distinct), median(gaps)


async def _totals(engine: Any) -> dict[str, Any]:
    (totals,) = await engine.collective_rpc("eldr_step_totals")
    return dict(totals)


def _text(report: dict[str, Any]) -> str:
    law = report["law_s"]
    rows = [["batch", "distinct, one domain", "mixed", "ms, one domain", "mixed"]]
    for size, figures in report["sizes"].items():
        rows.append(
            [
                size,
                *(
                    f"{figures[name]:.{digits}f}" if name in figures else "-"
                    for name, digits in (
                        ("one_distinct", 1),
                        ("mixed_distinct", 1),
                        ("one_ms", 2),
                        ("mixed_ms", 2),
                    )
                ),
            ]
        )
    return (
        f"{report['num_batches']} batches, experts of {report['expert_bytes'] / 1e3:,.0f} KB\n"
        f"{table(rows)}\n\n"
        f"step = {1e3 * law['base']:.4g} ms + {1e3 * law['per_request']:.4g} ms x batch + "
        f"{1e3 * law['per_distinct']:.4g} ms x distinct\n"
        f"R squared {report['r_squared']:.3f}; of the batch alone {report['r_squared_batch']:.3f}; "
        f"within batch sizes, where only experts differ, {report['r_squared_within']:.3f}"
    )
