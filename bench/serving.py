"""`eldr bench serving`: the token path against SMG and stock Ray Serve LLM, side by side.

All three run on this machine at the same time, with one prefill and one decode engine each, and
take turns: what slows the machine for a while slows all of them. While one is measured the others
are stopped (SIGSTOP), since even idle ones take a good part of a small machine. Ratios are taken
round by round.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

import psutil

from app import processes
from app.config import EldrConfig, ModelConfig, RouterConfig, load_config
from bench.load import Job, LoadProcess, tokens_per_s, tpot_ms, ttft_ms
from bench.peers import Smg, Stock, find_smg, free_ports
from bench.report import Spread, progress_line, ratios, stdout_to_stderr, table
from deployments.engine import Phase, resolve_device

DEFAULT_MODEL = "build/demo-model"
NUM_SINGLES = 8
PROMPT_TOKENS = (20, 60)
IDLE_S = 10.0
# vLLM's processes spin for a second after their last step; that must not hit the next system.
SETTLE_S = 2.0
EXIT_USAGE = 2

OURS, STOCK, SMG = "ours", "stock", "smg"
NAMES = {OURS: "Eldr Serve", STOCK: "Ray Serve LLM, stock", SMG: "SMG + vLLM servers"}

# Kinds of text that a mixed workload has; prompts are pieces of them.
TEXTS = (
    "Complete the following Python function.\n\ndef is_prime(n: int) -> bool:\n    if n < 2:\n"
    "        return False\n    for d in range(2, int(n ** 0.5) + 1):\n        if n % d == 0:\n",
    "A train leaves the station at 9:40 and travels 210 km at a mean speed of 84 km/h. It stops "
    "twice on its way, for 6 minutes each time. At what time does it arrive? Show every step.",
    "The tenant may end this agreement by written notice of three months. Either party may end it "
    "at once for good cause, in particular when the other party has broken a material duty.",
    "A 54-year-old patient presents with chest pain that radiates to the left arm and has lasted "
    "for forty minutes. Blood pressure is 150/95. Which examination should come first, and why?",
    "Quelle est la différence entre une abeille et une guêpe ? Expliquez en quelques phrases "
    "comment elles vivent, ce qu'elles mangent et pourquoi l'une meurt après avoir piqué.",
    "请用简单的语言解释为什么天空是蓝色的，为什么日落的时候天空会变成红色。"
    "请举一个日常生活中的例子，并说明光在空气中是怎样散射的，以及海水为什么看起来也是蓝色的。",
    "Объясните простыми словами, почему осенью листья меняют цвет и опадают, а ели и сосны "
    "остаются зелёными всю зиму. Приведите два примера деревьев каждого вида.",
)


Tree = Callable[[], list[psutil.Process]]
"""Lists the processes of a system."""


@dataclass(frozen=True, slots=True)
class Target:
    """A bound on one figure of the report.

    Attributes:
        key: figure in the report.
        label: text of the table.
        bound: the value to reach.
        is_floor: whether more is better.
    """

    key: str
    label: str
    bound: float
    is_floor: bool

    def is_met(self, value: float) -> bool:
        return value >= self.bound if self.is_floor else value <= self.bound

    def text(self) -> str:
        return f"{'>=' if self.is_floor else '<='} {self.bound:g}"


TARGETS = (
    Target("tokens_ratio_smg", "tokens/s, ours / SMG", 0.85, True),
    Target("tokens_ratio_stock", "tokens/s, ours / stock", 2.5, True),
    Target("tpot_ratio_smg", "TPOT p50, ours / SMG", 1.2, False),
    Target("ttft_ratio_smg", "TTFT p50 single, ours / SMG", 1.5, False),
    Target("idle_cpu", "idle CPU of ours, cores", 0.3, False),
)


@dataclass(frozen=True, slots=True)
class Sample:
    """One system in one round: a burst of concurrent streams, then single requests."""

    tokens_s: float
    tpot_ms: float
    ttft_ms: float
    ttft_burst_ms: float
    tpot_single_ms: float
    events_per_stream: float


COLUMNS = {
    "tokens_s": ("tokens/s", 0),
    "tpot_ms": ("TPOT ms p50", 2),
    "ttft_ms": ("TTFT ms p50, single", 1),
    "ttft_burst_ms": ("TTFT ms p50, burst", 0),
    "tpot_single_ms": ("TPOT ms p50, single", 2),
}


@dataclass(frozen=True, slots=True)
class Load:
    """Size of the load: rounds, and streams and tokens of a burst."""

    rounds: int = 5
    seed: int = 0
    streams: int = 32
    tokens: int = 32


def add_cli(subparsers: Any) -> None:
    """Register `serving` among the sub-parsers of `eldr bench`."""
    parser = subparsers.add_parser(
        "serving", help="token path against SMG and stock Ray Serve LLM (minutes)"
    )
    parser.add_argument(
        "config",
        metavar="CONFIG",
        nargs="?",
        help=f"application to derive from; default: one for the model folder {DEFAULT_MODEL}",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    defaults = Load()
    for name, text in {
        "rounds": "rounds; each measures every system once",
        "seed": "seed of prompts and order",
        "streams": "concurrent streams of a burst",
        "tokens": "tokens of a stream",
    }.items():
        parser.add_argument(
            f"--{name}",
            type=int,
            default=getattr(defaults, name),
            help=f"{text} (default %(default)s)",
        )
    parser.set_defaults(func=_command)


def _command(args: argparse.Namespace) -> int:
    load = Load(args.rounds, args.seed, args.streams, args.tokens)
    if min(load.rounds, load.streams) < 1 or load.tokens < 2:
        raise ValueError("--rounds and --streams must be >= 1, --tokens >= 2")
    progress = progress_line()
    smg = find_smg()
    if smg is None:
        progress("eldr: smg is not installed: run `pip install 'eldr-serve[bench]'`, then retry")
        return EXIT_USAGE
    config = derive(load_config(args.config) if args.config else _default_config(), load.streams)
    with stdout_to_stderr():
        report = measure(config, load, smg, progress)
    print(json.dumps(report) if args.json else text_report(report))
    return 0


def _default_config() -> EldrConfig:
    path = Path(DEFAULT_MODEL)
    if not (path / "config.json").is_file():
        raise ValueError(f"no model in {path}: run `eldr demo-model unpack`, or give a CONFIG")
    return EldrConfig(
        model=ModelConfig(path=str(path.resolve()), served_name="demo"),
        router=RouterConfig(policy="jsq"),
    )


def derive(config: EldrConfig, streams: int) -> EldrConfig:
    """The application that is measured: small pools and a router that needs no artifact.

    Raises:
        ValueError: the configuration is for GPUs.
    """
    if resolve_device(config) != "cpu":
        raise ValueError("eldr bench serving compares CPU engines: set device: cpu")
    pool = {
        "num_replicas": 1,
        "num_cpus": 0.1,  # logical ones; two applications share a Ray session
        "max_num_seqs": max(64, streams),
        "kv_cache_gib": 1,
    }
    router = {"policy": "jsq", "artifact": None, "capture": True}
    limits = {"api_keys_env": None, "requests_per_minute": None}
    return config.model_copy(
        update={
            "device": "cpu",
            "prefill": config.prefill.model_copy(update=pool),
            "decode": config.decode.model_copy(update=pool),
            "router": config.router.model_copy(update=router),
            "limits": config.limits.model_copy(update=limits),
        }
    )


def measure(
    config: EldrConfig, load: Load, smg: str, progress: Callable[[str], None]
) -> dict[str, Any]:
    """Start ours, measure its idle cost, start the others, run the rounds, end everything.

    Args:
        config: what `derive` made.
        load: size of the load.
        smg: path of the `smg` program.
        progress: told what is going on.

    Returns:
        The report: figures of `TARGETS`, medians and spreads per system, rounds and seed.

    Raises:
        RuntimeError: a system did not start, or a request failed.
    """
    from app import local

    tokenizer = load_tokenizer(config.model.path)
    with ExitStack() as stack:
        generator = stack.enter_context(LoadProcess())
        bench = Bench(generator, load, config.model.served_name, tokenizer, progress)
        progress(f"{NAMES[OURS]}: starting")
        before = set(psutil.Process().children())
        running = local.start(config, lambda text: progress(f"{NAMES[OURS]}: {text}"))
        started = set(psutil.Process().children()) - before
        roots = [p for p in started if not processes.is_guard(p)]
        stack.callback(running.stop)
        bench.warm_up(OURS, running.url)
        progress(f"idle CPU over {IDLE_S:g} s")
        time.sleep(SETTLE_S)
        idle_cpu = cpu_share(running.run_id, IDLE_S)
        peers = _start_peers(stack, config, smg, progress)
        for name, peer in peers.items():
            progress(f"{NAMES[name]}: waiting for it")
            peer.wait(_probe(config.model.served_name))
            bench.warm_up(name, peer.url)
        progress(f"memory, sum of RSS: {rss_gib(running.run_id):.1f} GiB")
        urls = {OURS: running.url, **{name: peer.url for name, peer in peers.items()}}
        trees: dict[str, Tree] = {OURS: partial(processes.with_descendants, roots)}
        trees |= {name: peer.processes for name, peer in peers.items()}
        samples = bench.run(urls, trees)
    return make_report(samples, idle_cpu, load)


def _start_peers(
    stack: ExitStack, config: EldrConfig, smg: str, progress: Callable[[str], None]
) -> dict[str, Stock | Smg]:
    """Start both at once: most of a start is imports."""
    progress(f"starting {NAMES[STOCK]} and {NAMES[SMG]}")
    stock_port, *ports = free_ports(5, config.http.host)
    smg_system = Smg(config, smg, dict(zip(Phase, ports[2:], strict=True)))
    stack.callback(smg_system.stop)
    stock = Stock(config, stock_port, dict(zip(Phase, ports[:2], strict=True)))
    stack.callback(stock.stop)
    return {STOCK: stock, SMG: smg_system}


class Bench:
    """Sends the same prompts to each system in turn."""

    def __init__(
        self,
        generator: LoadProcess,
        load: Load,
        model: str,
        tokenizer: Any,
        progress: Callable[[str], None],
    ) -> None:
        self._generator, self._load, self._model = generator, load, model
        self._tokenizer, self._progress = tokenizer, progress

    def warm_up(self, name: str, url: str) -> None:
        """Two rounds that are not counted."""
        for i in range(2):
            self._sample(url, self._prompts(f"warm-up {i}"))
        self._progress(f"{NAMES[name]}: ready, warmed up")

    def run(self, urls: dict[str, str], trees: Mapping[str, Tree]) -> dict[str, list[Sample]]:
        """Measure every system in every round, in an order drawn per round, the others stopped."""
        samples: dict[str, list[Sample]] = {name: [] for name in urls}
        for i in range(self._load.rounds):
            prompts = self._prompts(f"round {i}")
            for name in round_order(list(urls), self._load.seed, i):
                time.sleep(SETTLE_S)  # those that were stopped catch up
                with stopped(trees, except_for=name):
                    sample = self._sample(urls[name], prompts)
                samples[name].append(sample)
                self._progress(
                    f"round {i + 1}/{self._load.rounds}  {NAMES[name]:<{_name_width()}}  "
                    f"{sample.tokens_s:6.0f} tokens/s  TPOT {sample.tpot_ms:6.2f} ms  "
                    f"TTFT {sample.ttft_ms:6.1f} ms"
                )
        return samples

    def _prompts(self, tag: str) -> list[str]:
        number = self._load.streams + NUM_SINGLES
        return make_prompts(self._tokenizer, number, f"{self._load.seed} {tag}")

    def _sample(self, url: str, prompts: list[str]) -> Sample:
        streams, tokens = self._load.streams, self._load.tokens
        time.sleep(SETTLE_S)
        burst = self._generator.run(Job(url, self._model, prompts[:streams], tokens, streams))
        singles = self._generator.run(Job(url, self._model, prompts[streams:], tokens, 1))
        return Sample(
            tokens_s=tokens_per_s(burst),
            tpot_ms=tpot_ms(burst),
            ttft_ms=ttft_ms(singles),
            ttft_burst_ms=ttft_ms(burst),
            tpot_single_ms=tpot_ms(singles),
            events_per_stream=mean(s.events for s in burst),
        )


@contextmanager
def stopped(trees: Mapping[str, Tree], except_for: str) -> Iterator[None]:
    """Stop the processes of all systems but one; they go on afterwards."""
    halted = [p for name, tree in trees.items() if name != except_for for p in tree()]
    try:
        for process in halted:
            _signal(process, signal.SIGSTOP)
        yield
    finally:
        for process in halted:
            _signal(process, signal.SIGCONT)


def _signal(process: psutil.Process, number: int) -> None:
    try:
        process.send_signal(number)
    except psutil.Error:
        pass  # it has ended


def round_order(names: Sequence[str], seed: int, index: int) -> list[str]:
    """Order of the systems in one round."""
    order = list(names)
    random.Random(f"{seed} order {index}").shuffle(order)
    return order


def load_tokenizer(model: str) -> Any:
    """The model's tokenizer, from its folder or the hub."""
    from tokenizers import Tokenizer

    file = Path(model) / "tokenizer.json"
    return Tokenizer.from_file(str(file)) if file.is_file() else Tokenizer.from_pretrained(model)


def make_prompts(tokenizer: Any, number: int, seed: str) -> list[str]:
    """Prompts of 20-60 tokens of mixed kinds that no prefix cache has seen.

    Args:
        tokenizer: gives `encode(text).ids` and `decode(ids)`.
        number: how many.
        seed: equal seeds give equal prompts.
    """
    rng = random.Random(seed)
    prompts = []
    for i in range(number):
        text = f"{rng.getrandbits(32):08x} {TEXTS[i % len(TEXTS)]}"
        prompts.append(tokenizer.decode(tokenizer.encode(text).ids[: rng.randint(*PROMPT_TOKENS)]))
    return prompts


def cpu_share(run_id: str, duration_s: float) -> float:
    """CPU seconds a second that a run's processes use, this process among them."""
    before, started = _cpu_times(run_id), time.monotonic()
    time.sleep(duration_s)
    after, elapsed_s = _cpu_times(run_id), time.monotonic() - started
    return sum(time_s - before.get(pid, 0.0) for pid, time_s in after.items()) / elapsed_s


def rss_gib(run_id: str) -> float:
    """Memory of a run's processes; pages that several share count for each of them."""
    total = 0
    for process in _processes(run_id):
        try:
            total += process.memory_info().rss
        except psutil.Error:
            continue  # it has ended
    return total / 2**30


def _processes(run_id: str) -> set[psutil.Process]:
    """This process and the run's, found by their mark and by descent.

    vLLM's processes write their title over their environment, and with it the mark.
    """
    found = {psutil.Process()}
    for process in processes.find(run_id):
        found.add(process)
        try:
            found.update(process.children(recursive=True))
        except psutil.Error:
            continue  # it has ended
    return found


def _cpu_times(run_id: str) -> dict[int, float]:
    times: dict[int, float] = {}
    for process in _processes(run_id):
        try:
            used = process.cpu_times()
        except psutil.Error:
            continue  # it has ended
        times[process.pid] = used.user + used.system
    return times


def make_report(samples: dict[str, list[Sample]], idle_cpu: float, load: Load) -> dict[str, Any]:
    """Figures of `TARGETS`; under "systems" medians, spreads and the ratios of ours to a peer."""
    systems: dict[str, Any] = {}
    for name, rows in samples.items():
        systems[name] = {
            key: Spread.of([getattr(row, key) for row in rows]).as_dict()
            for key in Sample.__dataclass_fields__
        }
        if name != OURS:
            systems[name]["ours_to_it"] = _ratios(samples[OURS], rows)
    smg, stock = systems[SMG]["ours_to_it"], systems[STOCK]["ours_to_it"]
    return {
        "tokens_ratio_smg": smg["tokens_s"]["median"],
        "tokens_ratio_stock": stock["tokens_s"]["median"],
        "tpot_ratio_smg": smg["tpot_ms"]["median"],
        "ttft_ratio_smg": smg["ttft_ms"]["median"],
        "idle_cpu": round(idle_cpu, 3),
        "systems": systems,
        **asdict(load),
    }


def _ratios(ours: list[Sample], peer: list[Sample]) -> dict[str, dict[str, float]]:
    return {
        key: ratios([getattr(a, key) for a in ours], [getattr(b, key) for b in peer]).as_dict()
        for key in COLUMNS
    }


def text_report(report: dict[str, Any]) -> str:
    """Two tables for people: systems, and our figures against their targets."""
    rows = [["median (min..max)", *(title for title, _ in COLUMNS.values())]]
    for name, system in report["systems"].items():
        cells = [Spread(**system[key]).text(digits) for key, (_, digits) in COLUMNS.items()]
        rows.append([NAMES[name], *cells])
    head = (
        f"{report['streams']} streams x {report['tokens']} tokens, 1 prefill + 1 decode engine, "
        f"{report['rounds']} rounds, seed {report['seed']}"
    )
    return "\n\n".join([head, table(rows), table(_target_rows(report))])


def _target_rows(report: dict[str, Any]) -> list[list[str]]:
    spreads = {
        "tokens_ratio_smg": (SMG, "tokens_s"),
        "tokens_ratio_stock": (STOCK, "tokens_s"),
        "tpot_ratio_smg": (SMG, "tpot_ms"),
        "ttft_ratio_smg": (SMG, "ttft_ms"),
    }
    rows = [["ratios per round", "median (min..max)", "target", ""]]
    for target in TARGETS:
        value = f"{report[target.key]:.2f}"
        if target.key in spreads:
            peer, key = spreads[target.key]
            value = Spread(**report["systems"][peer]["ours_to_it"][key]).text(2)
        verdict = "ok" if target.is_met(report[target.key]) else "missed"
        rows.append([target.label, value, target.text(), verdict])
    return rows


def _probe(model: str) -> dict[str, Any]:
    return {"model": model, "prompt": "hello", "max_tokens": 1, "temperature": 0}


def _name_width() -> int:
    return max(len(name) for name in NAMES.values())
