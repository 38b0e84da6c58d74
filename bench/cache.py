"""`eldr bench cache`: what the expert cache costs on a hit, and what each pairing of rules loads.

Real engines on this machine, side by side and in turns, so that a drift of the machine hits all
sides alike:
- overhead: two decode engines, one without a cache and one whose slots hold every expert, decode
  the same prompts;
- loads: one prefill and two decode engines with half of the experts in slots serve requests of
  several domains, routed by the live router's core; routing rule and cache policy change from run
  to run.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import itertools
import json
import random
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from statistics import median
from typing import Any, get_args

import numpy as np

from app.config import (
    CacheConfig,
    DecodeConfig,
    EldrConfig,
    ModelConfig,
    PrefillConfig,
    RouterConfig,
)
from app.prefill_request import ASK_FOR_HANDOFF
from bench.engines import start_engine
from bench.peers import free_ports
from bench.report import Spread, progress_line, stdout_to_stderr, table
from cachemgr.learned import HALF_LIVES, ScoreTable
from cachemgr.policies import ExpertCache, make_retention
from cachemgr.training import GAMMA, default_reach
from cachemgr.types import BoolArray, FloatArray, IntArray
from calibration.artifact import Artifact
from calibration.capture import Prompt, read_prompts, sample
from deployments.clients import split_handoff
from deployments.engine import Phase, resolve_device
from deployments.vllm_adapter.capture import decode_counts
from deployments.vllm_adapter.slots import token_groups
from router.core import RoutingCore
from router.policy import make_policy
from router.service import heartbeat_s

DEFAULT_MODEL = Path("build/demo-model")
DEFAULT_ARTIFACT = Path("models/demo/calibration")
DEFAULT_SCORE = Path("models/demo/cache-score")
DEFAULT_PROMPTS = Path("data/prompts")
TARGET = 1.08
BATCHES = (1, 16)  # requests decoded together; the last one gives `hit_overhead_ratio`
OVERHEAD_TOKENS = 48
DOMAINS = ("code", "math", "medical", "legal")
ROUTINGS = ("jsq", "soft", "live")
POLICIES = ("lru", "lrfu", "temporal", "learned")
DECODE_TOKENS = 32
FRACTION = 0.5
POLICY_SHAPE = (24, 128, 64, 8, 16)  # layers, experts, slots, top-k, tokens: of a large model
POLICY_STEPS = 100
# Spread of the logits that a layer's tokens share and of a token's own, and scale of their noise.
# A token keeps 40 % of its experts from step to step, as those of GPT-OSS-20B do, and a step takes
# 54 experts, which fit in the slots, or 67, which do not.
ALIKE, UNLIKE = (1.6, 1.2, 0.9), (1.0, 1.5, 0.8)


def add_cli(subparsers: Any) -> None:
    """Register `cache` among the sub-parsers of `eldr bench`."""
    parser = subparsers.add_parser("cache", help="expert cache: cost of a hit, loads (minutes)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--model", type=Path, default=DEFAULT_MODEL, help="model folder (default %(default)s)"
    )
    parser.add_argument(
        "--dtype",
        choices=get_args(ModelConfig.model_fields["dtype"].annotation),
        default="auto",
        help="of the engines, as model.dtype (default %(default)s)",
    )
    parser.add_argument(
        "--only",
        choices=("overhead", "loads"),
        help="measure one part alone; the other's figures are left out",
    )
    for name, default, text in (
        ("rounds", 9, "rounds of the overhead; each measures both sides"),
        ("runs", 3, "runs of each pairing of routing rule and cache policy"),
        ("requests", 64, "requests of a run"),
        ("concurrency", 16, "requests in flight in a run"),
        ("seed", 0, "seed of prompts and order"),
    ):
        parser.add_argument(
            f"--{name}", type=int, default=default, help=f"{text} (default %(default)s)"
        )
    for name, known, text in (
        ("routings", ROUTINGS, "routing rules whose loads are compared"),
        ("policies", POLICIES, "cache policies whose loads are compared"),
    ):
        parser.add_argument(
            f"--{name}", nargs="+", choices=known, default=known, help=f"{text} (default: all)"
        )
    parser.set_defaults(func=_command)


def _command(args: argparse.Namespace) -> int:
    if min(args.rounds, args.runs, args.requests, args.concurrency) < 1:
        raise ValueError("--rounds, --runs, --requests and --concurrency must be >= 1")
    if not (args.model / "config.json").is_file():
        raise ValueError(
            f"no model in {args.model}: run `eldr demo-model unpack`, or give --model DIR"
        )
    model = ModelConfig(path=str(args.model.resolve()), served_name="bench", dtype=args.dtype)
    progress = progress_line()
    report: dict[str, Any] = {}
    with stdout_to_stderr(), tempfile.TemporaryDirectory(prefix="eldr-bench-") as folder:
        if args.only != "loads":
            report |= asyncio.run(measure_overhead(model, folder, args.rounds, args.seed, progress))
            gc.collect()
            report["policy_us"] = policy_us(args.seed, ALIKE)
            report["policy_split_us"] = policy_us(args.seed, UNLIKE)
        if args.only != "overhead":
            workload = Workload(args.requests, args.concurrency, args.seed)
            pairs = list(itertools.product(args.routings, args.policies))
            report |= asyncio.run(
                measure_loads(model, folder, pairs, args.runs, workload, progress)
            )
            gc.collect()
    print(json.dumps(report) if args.json else _text(report))
    return 0


# ---- overhead ------------------------------------------------------------------------------------


async def measure_overhead(
    model: ModelConfig, store_dir: str, rounds: int, seed: int, progress: Callable[[str], None]
) -> dict[str, Any]:
    """Decode steps with all experts in slots against none in a cache; then halve the slots.

    Returns:
        hit_overhead_ratio (median over rounds, at the largest batch), hit_overhead (spread and
        times for each batch), resident_ratio and resident_rss_ratio.
    """
    sides = {
        "on": bench_config(model, store_dir, fraction=1.0),
        "off": bench_config(model, store_dir, fraction=None),
    }
    rng = np.random.default_rng(seed)
    with ExitStack() as stack:
        engines: dict[str, Any] = {}
        stack.callback(engines.clear)
        for (side, config), port in zip(sides.items(), free_ports(2), strict=True):
            progress(f"starting the engine with cache {side}")
            engines[side] = start_engine(config, Phase.DECODE, port)
            stack.callback(engines[side].shutdown)
        vocab_size = engines["on"].model_config.get_vocab_size()
        times: dict[int, dict[str, list[float]]] = {n: {s: [] for s in sides} for n in BATCHES}
        for i in range(-1, rounds):  # the first one warms up: it fills the slots
            for batch in BATCHES:
                prompts = [rng.integers(vocab_size, size=40).tolist() for _ in range(batch)]
                for side in list(sides) if i % 2 else list(sides)[::-1]:
                    step = await _step_time(engines[side], prompts, f"{i} {batch}")
                    if i >= 0:
                        times[batch][side].append(step)
            if i >= 0:
                progress(
                    f"round {i + 1}/{rounds}  "
                    + "  ".join(
                        f"batch {n}: on {t['on'][-1] * 1e3:.2f} off {t['off'][-1] * 1e3:.2f} ms"
                        for n, t in times.items()
                    )
                )
        prompts = [rng.integers(vocab_size, size=40).tolist() for _ in range(max(BATCHES))]
        resident = await _halve(engines["on"], prompts)
    return {**overhead_report(times), **resident}


def overhead_report(times: Mapping[int, Mapping[str, Sequence[float]]]) -> dict[str, Any]:
    """Ratios of rounds, on / off; `times` holds the median step of each round in seconds."""
    result: dict[str, Any] = {}
    for batch, of_side in times.items():
        ratio = Spread.of([a / b for a, b in zip(of_side["on"], of_side["off"], strict=True)])
        result[str(batch)] = {
            **ratio.as_dict(4),
            "on_ms": round(median(of_side["on"]) * 1e3, 3),
            "off_ms": round(median(of_side["off"]) * 1e3, 3),
        }
    return {
        "hit_overhead_ratio": result[str(max(times))]["median"],
        "hit_overhead": result,
    }


async def _step_time(engine: Any, prompts: list[list[int]], tag: str) -> float:
    """Median time between two tokens while all prompts decode together, in seconds."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    arrivals: list[list[float]] = []

    async def one(i: int, prompt: list[int]) -> None:
        params = SamplingParams(
            max_tokens=OVERHEAD_TOKENS,
            temperature=0,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        times: list[float] = []
        async for _ in engine.generate({"prompt_token_ids": prompt}, params, f"{tag} {i}"):
            times.append(time.perf_counter())
        arrivals.append(times)

    await asyncio.gather(*(one(i, prompt) for i, prompt in enumerate(prompts)))
    start = max(times[0] for times in arrivals)
    end = min(times[-1] for times in arrivals)
    steps = [
        b - a for times in arrivals for a, b in itertools.pairwise(times) if start <= a and b <= end
    ]
    return median(steps)


async def _halve(engine: Any, prompts: list[list[int]]) -> dict[str, Any]:
    """Bytes of expert weights with half of the slots, by tensors and by the process's memory.

    The process is measured with half of the slots first: to change them gives back what it had
    freed before.
    """
    (stats,) = await engine.collective_rpc("eldr_cache_stats")
    measured = []
    for slots in (stats["num_experts"] // 2, stats["num_experts"]):
        await engine.collective_rpc("eldr_cache_configure", args=({"slots": slots},))
        for i in range(2):  # empty slots take no memory yet
            await _step_time(engine, prompts, f"{slots} slots {i}")
        (stats,) = await engine.collective_rpc("eldr_cache_stats")
        measured.append(stats)
    half, full = measured
    grown = full["anonymous_bytes"] - half["anonymous_bytes"]
    return {
        "resident_ratio": round(half["slot_bytes"] / half["full_bytes"], 4),
        "resident_rss_ratio": round(1 - grown / half["full_bytes"], 4),
    }


def policy_us(
    seed: int, spread: tuple[float, float, float], steps: int = POLICY_STEPS
) -> dict[str, float]:
    """Time of one layer's decision in microseconds, by policy, hits and misses as they come.

    Batches of tokens whose experts drift slowly, on the shape of a large model. Its layers take
    turns, so that a score's weights come from as far in memory as they do in a worker. A step
    whose experts do not fit in the slots is split by tokens, as in a worker.

    Args:
        seed: of the tokens.
        spread: of the logits that tokens share and of a token's own, and the scale of their noise.
        steps: of each policy.
    """
    num_layers, num_experts, capacity, top_k, tokens = POLICY_SHAPE
    rng = np.random.default_rng(seed)
    shared, own, noise = spread
    logits_LTE = rng.normal(size=(num_layers, 1, num_experts)) * shared
    logits_LTE = logits_LTE + rng.normal(size=(num_layers, tokens, num_experts)) * own
    steps_LTk: list[IntArray] = []
    for _ in range(steps):
        logits_LTE += rng.normal(size=logits_LTE.shape) * 0.05
        keys_LTE = logits_LTE + rng.gumbel(size=logits_LTE.shape) * noise
        best_LTE = np.argpartition(-keys_LTE, top_k, axis=2)
        steps_LTk.append(np.ascontiguousarray(best_LTE[:, :, :top_k]))
    table = _random_score(num_layers, num_experts, rng)
    result = {}
    for policy in POLICIES:
        name = "given" if policy == "temporal" else policy
        retention = make_retention(name, num_layers, num_experts, table=table)
        cache = ExpertCache(num_layers, num_experts, capacity, top_k, retention)
        scores_E = rng.random(num_experts) if name == "given" else None
        times_s = []
        for ids_LTk in steps_LTk:
            for layer, ids_Tk in enumerate(ids_LTk):
                started = time.perf_counter()
                _decide(cache, layer, ids_Tk, scores_E)
                times_s.append(time.perf_counter() - started)
        result[policy] = round(median(times_s) * 1e6, 1)
    return result


def _decide(cache: ExpertCache, layer: int, ids_Tk: IntArray, scores_E: FloatArray | None) -> None:
    """What `SlotRuntime` decides for a layer that lacks experts."""
    demand_E = _experts_of(ids_Tk, cache)
    if np.count_nonzero(demand_E) <= cache.capacity:
        cache.access(layer, demand_E, scores_E)
        return
    for tokens in token_groups(ids_Tk, cache.resident_LE[layer], cache.capacity):
        cache.access(layer, _experts_of(ids_Tk[tokens], cache), scores_E)


def _experts_of(ids_Tk: IntArray, cache: ExpertCache) -> BoolArray:
    chosen_E = np.zeros(cache.slot_LE.shape[1], dtype=np.bool_)
    chosen_E[ids_Tk] = True
    return chosen_E


def _random_score(num_layers: int, num_experts: int, rng: np.random.Generator) -> ScoreTable:
    """A learned score of the shape that training would give it."""
    width = 2 * default_reach(num_layers, num_experts) + 1
    own, window, bias = (
        rng.normal(size=(num_layers, *shape, num_experts)).astype(np.float32)
        for shape in ((len(HALF_LIVES),), (width, num_experts), ())
    )
    return ScoreTable("random", None, HALF_LIVES, GAMMA, own, window, bias, {})


# ---- loads ---------------------------------------------------------------------------------------


class Workload:
    """Requests of several domains in a fixed order.

    Args:
        requests: requests of a run.
        concurrency: requests in flight.
        seed: of the order.
    """

    def __init__(self, requests: int, concurrency: int, seed: int) -> None:
        self.concurrency = concurrency
        self._seed = seed
        pool = [p for p in read_prompts(DEFAULT_PROMPTS, "test") if len(p.text) < 1200]
        each = -(-requests // len(DOMAINS))
        chosen: list[Prompt] = []
        for domain in DOMAINS:
            chosen += sample([p for p in pool if p.label == domain], each, seed=seed)
        self.prompts = chosen

    def order(self, run: int) -> list[Prompt]:
        """The prompts as they arrive in one run; the same for every pairing."""
        prompts = list(self.prompts)
        random.Random(f"{self._seed} {run}").shuffle(prompts)
        return prompts


async def measure_loads(
    model: ModelConfig,
    store_dir: str,
    pairs: Sequence[tuple[str, str]],
    runs: int,
    workload: Workload,
    progress: Callable[[str], None],
) -> dict[str, Any]:
    """Expert loads per decoded token for pairings of routing rule and cache policy.

    Every run starts with empty slots; pairings take turns in an order drawn per run.

    Returns:
        loads_per_token by "routing/policy" (median of runs), loads_spread, hit_rate,
        distinct_per_step (experts of a layer that a step uses, mean).
    """
    config = bench_config(model, store_dir, fraction=FRACTION)
    artifact = Artifact.load(DEFAULT_ARTIFACT)
    results: dict[str, list[dict[str, float]]] = {"/".join(pair): [] for pair in pairs}
    with ExitStack() as stack:
        engines: list[Any] = []
        stack.callback(engines.clear)
        for phase, port in zip(
            (Phase.PREFILL, Phase.DECODE, Phase.DECODE), free_ports(3), strict=True
        ):
            progress(f"starting a {phase} engine")
            engines.append(start_engine(config, phase, port))
            stack.callback(engines[-1].shutdown)
        served = Served(engines[0], engines[1:], artifact, workload.concurrency)
        for run in range(runs):
            prompts = workload.order(run)
            for routing, policy in random.Random(f"pairs {run}").sample(pairs, len(pairs)):
                pair = f"{routing}/{policy}"
                result = await served.run(prompts, routing, policy, f"{run} {pair}")
                results[pair].append(result)
                progress(
                    f"run {run + 1}/{runs}  {pair:<14} {result['loads_per_token']:6.2f} loads a "
                    f"token, hit rate {result['hit_rate']:.3f}"
                )
        del served  # or the engines outlive their shutdown and complain
    return loads_report(results)


def loads_report(results: Mapping[str, Sequence[Mapping[str, float]]]) -> dict[str, Any]:
    """Medians over runs by pairing, and the spread of the loads."""
    spreads = {p: Spread.of([r["loads_per_token"] for r in of]) for p, of in results.items()}
    return {
        "loads_per_token": {pair: round(s.median, 3) for pair, s in spreads.items()},
        "loads_spread": {pair: s.as_dict() for pair, s in spreads.items()},
        **{
            name: {pair: round(median(r[name] for r in of), 4) for pair, of in results.items()}
            for name in ("hit_rate", "distinct_per_step")
        },
    }


class Served:
    """One prefill and several decode engines behind a routing core, in this process."""

    def __init__(
        self, prefill: Any, decode: Sequence[Any], artifact: Artifact, concurrency: int
    ) -> None:
        self._prefill, self._artifact = prefill, artifact
        self._decode = {f"decode-{i}": engine for i, engine in enumerate(decode)}
        self._slots = asyncio.Semaphore(concurrency)

    async def run(
        self, prompts: Sequence[Prompt], routing: str, policy: str, tag: str
    ) -> dict[str, float]:
        """Serve the prompts from empty slots.

        Returns:
            loads_per_token, hit_rate and distinct_per_step over both decode engines.
        """
        rule = make_policy(routing, seed=1, caches_experts=True)
        core = RoutingCore(rule, self._artifact, seed=1)
        core.set_replicas(list(self._decode))
        score = str(DEFAULT_SCORE) if policy == "learned" else None
        await self._each("eldr_cache_configure", {"policy": policy, "score_file": score})
        before = await self._each("eldr_cache_stats")
        reports = asyncio.create_task(self._report_residents(core))
        tokens = sum(
            await asyncio.gather(
                *(self._serve(core, p, f"{tag} {i}") for i, p in enumerate(prompts))
            )
        )
        reports.cancel()
        with suppress(asyncio.CancelledError):
            await reports  # raises what had ended it before
        after = await self._each("eldr_cache_stats")
        used = {
            key: sum(b[key] - a[key] for a, b in zip(before, after, strict=True))
            for key in ("accesses", "hits", "demand_loads", "proactive_loads", "layer_steps")
        }
        return {
            "loads_per_token": (used["demand_loads"] + used["proactive_loads"]) / tokens,
            "hit_rate": used["hits"] / used["accesses"],
            "distinct_per_step": used["accesses"] / used["layer_steps"],
        }

    async def _each(self, method: str, *args: Any) -> list[dict[str, Any]]:
        results = []
        for engine in self._decode.values():
            (result,) = await engine.collective_rpc(method, args=args)
            if "error" in result:
                raise ValueError(result["error"])
            results.append(result)
        return results

    async def _report_residents(self, core: RoutingCore) -> None:
        """Tell the core what the caches hold, as often as heartbeats do."""
        while True:
            for replica_id, engine in self._decode.items():
                (resident,) = await engine.collective_rpc("eldr_cache_resident")
                core.report_resident(replica_id, self._artifact.unpack_experts(resident))
            await asyncio.sleep(heartbeat_s(len(self._decode), tells_residents=True))

    async def _serve(self, core: RoutingCore, prompt: Prompt, request_id: str) -> int:
        """One request: prefill, choose, decode. Returns the tokens decoded after the first."""
        async with self._slots:
            final = await _generate(
                self._prefill, prompt.text, 1, dict(ASK_FOR_HANDOFF), f"p {request_id}"
            )
            handoff = split_handoff(final.kv_transfer_params, len(final.prompt_token_ids))
            counts_LE = decode_counts(
                handoff.counts or b"", self._artifact.num_layers, self._artifact.num_experts
            )
            now = time.monotonic()
            chosen = core.select(request_id, counts_LE, handoff.prompt_tokens, None, now)
            try:
                final = await _generate(
                    self._decode[chosen.replica_id],
                    prompt.text,
                    DECODE_TOKENS,
                    handoff.kv_transfer_params,
                    f"d {request_id}",
                )
            finally:
                core.release(request_id)
        return len(final.outputs[0].token_ids)


async def _generate(
    engine: Any, text: str, tokens: int, kv_transfer_params: Any, request_id: str
) -> Any:
    """The finished output of one request."""
    from vllm import SamplingParams

    params = SamplingParams(
        max_tokens=tokens,
        temperature=0,
        ignore_eos=True,
        detokenize=False,
        extra_args={"kv_transfer_params": kv_transfer_params},
    )
    final = None
    async for output in engine.generate({"prompt": text}, params, request_id):
        final = output
    return final


# ---- engines -------------------------------------------------------------------------------------


def bench_config(model: ModelConfig, store_dir: str, fraction: float | None) -> EldrConfig:
    """An application whose engines are measured; fraction None: without cache."""
    cache = CacheConfig(
        enabled=fraction is not None, fraction=fraction or 1.0, store_dir=store_dir, policy="lrfu"
    )
    base = EldrConfig(
        model=model,
        router=RouterConfig(policy="jsq"),
        cache=cache,
    )
    if resolve_device(base) == "gpu":
        return base
    return base.model_copy(
        update={"prefill": PrefillConfig(kv_cache_gib=1), "decode": DecodeConfig(kv_cache_gib=1)}
    )


def _text(report: Mapping[str, Any]) -> str:
    lines = []
    rows: list[tuple[str, ...]]
    if "hit_overhead" in report:
        rows = [("decode step, all experts resident", "cache on ms", "off ms", "on / off (range)")]
        rows += [
            (
                f"batch of {batch}",
                f"{of['on_ms']:.2f}",
                f"{of['off_ms']:.2f}",
                f"{of['median']:.3f} ({of['lo']:.3f}..{of['hi']:.3f})",
            )
            for batch, of in report["hit_overhead"].items()
        ]
        verdict = "ok" if report["hit_overhead_ratio"] <= TARGET else "missed"
        lines += [
            table(rows),
            f"on / off at the largest batch: target <= {TARGET:g}: {verdict}",
            *(
                f"one layer's decision of {POLICY_SHAPE[-1]} tokens{text}, us: "
                + ", ".join(f"{name} {us:g}" for name, us in report[key].items())
                for key, text in (("policy_us", ""), ("policy_split_us", " that are split"))
            ),
            f"expert memory with half of the slots: {report['resident_ratio']:.3f} of all by "
            f"tensors, {report['resident_rss_ratio']:.3f} by the process's memory",
            "",
        ]
    if "loads_per_token" in report:
        rows = [("routing/cache", "loads a token", "range", "hit rate", "experts a step and layer")]
        rows += [
            (
                pair,
                f"{loads:.2f}",
                f"{report['loads_spread'][pair]['lo']:.2f}..{report['loads_spread'][pair]['hi']:.2f}",
                f"{report['hit_rate'][pair]:.3f}",
                f"{report['distinct_per_step'][pair]:.1f}",
            )
            for pair, loads in report["loads_per_token"].items()
        ]
        lines.append(table(rows))
    return "\n".join(lines).rstrip()
