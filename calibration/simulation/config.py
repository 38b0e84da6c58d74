"""The schema of a simulation: workload, traffic, pools, step-time law, router, what to vary.

`load_simulation` reads a YAML file and names every problem at once, as `app.config` does. A sweep
is one or more dotted fields with their values; `SimulationConfig.variants` resolves it into one
configuration a value, each checked like the file itself.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, Self, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from app.config import RouterConfig
from app.config_errors import ConfigError, Problem, RelationError, problems_of, read_yaml

POLICIES: tuple[str, ...] = get_args(RouterConfig.model_fields["policy"].annotation)


class _Section(BaseModel):
    """Base of all sections: frozen, unknown keys refused, no silent conversion of types."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        populate_by_name=True,
        use_attribute_docstrings=True,
    )


class WorkloadSection(_Section):
    """Which experts requests use, in prefill and in decode."""

    source: Literal["synthetic", "trace"]
    """synthetic: a generator calibrated to published facts; trace: recorded choices."""

    structure: Literal["tasks", "languages"] = "tasks"
    """Synthetic: how strongly domains differ, as published for tasks or for languages."""

    num_requests: int = Field(default=1000, ge=4)
    """Synthetic: distinct requests made; half to fit the router on, half to serve."""

    num_layers: int = Field(default=48, ge=1)
    """Synthetic: MoE layers; 48 as in Qwen3-30B-A3B."""

    num_experts: int = Field(default=128, ge=2)
    """Synthetic: experts a layer; 128 as in Qwen3-30B-A3B."""

    top_k: int = Field(default=8, ge=1)
    """Synthetic: experts a token chooses in each layer; 8 as in Qwen3-30B-A3B."""

    trace: str | None = None
    """Trace: the .npz archive (relative paths count from the YAML file)."""

    trace_meta: str | None = None
    """Trace: JSON Lines file with the domains; None where the archive holds them."""

    trace_experts: int | None = Field(default=None, ge=2)
    """Trace: experts a layer; None takes the largest id and adds one."""

    trace_prompt_tokens: int = Field(default=64, ge=1)
    """Trace: first tokens of a request that stand for its prompt; 64 as in our replays."""

    trace_min_tokens: int = Field(default=128, ge=2)
    """Trace: shorter requests are left out; 128 leaves at least 64 tokens of decode."""

    output_tokens: int = Field(default=512, ge=2)
    """Length of an answer in tokens, the first one from prefill; 512 as in the paper."""

    output_lengths: Literal["fixed", "geometric"] = "fixed"
    """fixed: all answers have output_tokens; geometric: that many in the mean."""

    seed: int = Field(default=0, ge=0)
    """Seed of the generator and of the halves to fit and to serve; the same in every run."""


class CurvePoint(_Section):
    """One point of the day's curve, straight lines between points."""

    at_s: float = Field(ge=0)
    """Virtual seconds since the start."""

    factor: float = Field(ge=0)
    """Multiplies every rate of `traffic.rates`."""


class MixPoint(_Section):
    """Shares of the domains at one time, straight lines between points."""

    at_s: float = Field(ge=0)
    """Virtual seconds since the start."""

    weights: dict[str, float] = Field(min_length=1)
    """Relative share of each domain, >= 0; domains left out get none."""

    @field_validator("weights")
    @classmethod
    def _check_weights(cls, value: dict[str, float]) -> dict[str, float]:
        if min(value.values()) < 0 or sum(value.values()) <= 0:
            raise ValueError(f"must be >= 0 with a positive sum, got {value}")
        return value


class TrafficSection(_Section):
    """When requests arrive, and of which domain."""

    rates: list[float] = Field(min_length=1)
    """Requests per second; one run for each rate."""

    arrivals: Literal["poisson", "fixed", "bursty"] = "poisson"
    """poisson: independent; fixed: equal gaps; bursty: gamma gaps of larger variance."""

    burstiness: float = Field(default=4.0, gt=0)
    """Bursty: variance of a gap over the square of its mean; 1 would be poisson."""

    duration_s: float = Field(default=120.0, gt=0)
    """Virtual seconds of measured arrivals; 120 as in the paper."""

    warm_up_s: float = Field(default=30.0, ge=0)
    """Virtual seconds of arrivals before them that are not counted; 30 as in the paper."""

    curve: list[CurvePoint] = Field(default_factory=list)
    """Course of the rate over time; empty keeps it constant."""

    mix: list[MixPoint] = Field(default_factory=list)
    """Course of the domain shares; empty draws requests as the workload has them."""

    @field_validator("rates")
    @classmethod
    def _check_rates(cls, value: list[float]) -> list[float]:
        if min(value) <= 0:
            raise ValueError(f"must be > 0 requests per second, got {min(value)}")
        return value

    @model_validator(mode="after")
    def _check_order(self) -> Self:
        problems = []
        for name, points in (("curve", self.curve), ("mix", self.mix)):
            times = [point.at_s for point in points]
            if times != sorted(set(times)):
                text = f"at_s must rise from point to point, got {times}"
                problems.append(Problem(f"traffic.{name}", text))
        if self.curve and not any(point.factor > 0 for point in self.curve):
            problems.append(Problem("traffic.curve", "all factors are 0: no request would arrive"))
        if problems:
            raise RelationError(problems)
        return self


class PrefillSection(_Section):
    """Replicas that compute prompts: all that wait are computed in one step, as vLLM does.

    Default times are fitted to the paper's TTFT P50 of round robin at 20 requests per second
    (59.8 ms; Qwen, 8 eager prefill engines), not measured. At 100 they give 62 ms where the paper
    has 70: something else of its serving path grows with the rate.
    """

    replicas: int = Field(default=8, ge=1)
    """Prefill replicas; 8 as in the paper's 8PyD pools."""

    overhead_ms: float = Field(default=10.0, ge=0)
    """HTTP, tokenizing, scheduling, sampling: delay of a request that occupies no engine."""

    base_ms: float = Field(default=43.0, ge=0)
    """Time of a prefill step of no tokens."""

    per_token_ms: float = Field(default=0.05, ge=0)
    """Added by each prompt token that is not cached."""

    max_batched_tokens: int = Field(default=8192, ge=1)
    """Prompt tokens of one step; a longer prompt is computed alone."""

    num_prefixes: int = Field(default=0, ge=0)
    """Distinct prefixes that prompts begin with, drawn uniformly; 0: no prompt repeats another."""

    prefix_tokens: int = Field(default=0, ge=0)
    """Length of each prefix; computed once a replica, cached afterwards."""


class TransferSection(_Section):
    """Hand-over of KV from prefill to decode."""

    base_ms: float = Field(default=2.0, ge=0)
    """Time of a transfer of nothing."""

    per_token_ms: float = Field(default=0.002, ge=0)
    """Added by each prompt token; 0.002 is 96 KiB at 50 GB/s."""


class DecodeSection(_Section):
    """Replicas that generate answers, with continuous batching."""

    replicas: int = Field(default=16, ge=1)
    """Decode replicas at the start; 16 as in the paper's main pool."""

    max_num_seqs: int = Field(default=256, ge=1)
    """Requests computed in one step; further ones wait in order of arrival."""

    cache_slots: int | None = Field(default=None, ge=1)
    """Experts a layer that a replica holds (the likeliest of its batch); None holds all."""


class StepTimeSection(_Section):
    """Time of a decode step: base + per_request * batch + per_distinct * distinct experts + ..."""

    law: str = "linear"
    """linear: the fields below; `file`; or a named law (`eldr simulate --laws` lists them)."""

    base_ms: float = Field(default=1.0, ge=0)
    """Linear: time of an empty step."""

    per_request_ms: float = Field(default=0.01, ge=0)
    """Linear: added by each request of the batch."""

    per_distinct_ms: float = Field(default=0.09, ge=0)
    """Linear: added by each distinct expert, mean over layers."""

    per_load_ms: float = Field(default=0.0, ge=0)
    """Any law but `file`: added by each expert loaded (decode.cache_slots), mean over layers."""

    file: str | None = None
    """Report of `eldr bench step-time --json` (relative paths count from the YAML file)."""


class RouterSection(_Section):
    """How a decode replica is chosen: the objects of the live router."""

    policies: list[str] = Field(default_factory=lambda: list(POLICIES), min_length=1)
    """Rules to compare; all that the application knows by default."""

    tau: float = Field(default=0.1, ge=0, le=1)
    """Width of the locality band of policy `band`, in cosine units."""

    lambda_: float | None = Field(default=None, ge=0, alias="lambda")
    """Weight of load against similarity; None: 0.5 in `soft`, 0.4 in `live`."""

    max_load: float | None = Field(default=None, ge=1)
    """Most load of a replica in policy `live`, as a multiple of the mean; None: 1.5."""

    signature: Literal["count_idf", "count", "sqrt_count", "binary", "oracle"] = "count_idf"
    """What a request is compared by; oracle: its decode profile, known beforehand."""

    clustering: Literal["balanced", "vanilla"] = "balanced"
    """balanced: equal cluster sizes, the paper's; vanilla: plain spherical k-means."""

    refit: bool = False
    """Fits the centroids anew on recent requests whenever a decode replica comes or goes."""

    refit_every_s: float | None = Field(default=None, gt=0)
    """Seconds between refits for drift, taken if they help; None: only changes of the pool."""

    ramp_s: float = Field(default=0.0, ge=0)
    """Seconds in which a replica that joins comes to its full share; 0 gives it at once."""

    @field_validator("policies")
    @classmethod
    def _check_policies(cls, value: list[str]) -> list[str]:
        if unknown := [name for name in value if name not in POLICIES]:
            raise ValueError(f"unknown policy {unknown[0]!r}: use some of {', '.join(POLICIES)}")
        if len(set(value)) < len(value):
            raise ValueError(f"names a policy twice: {', '.join(value)}")
        return value


SIGNATURES: tuple[str, ...] = get_args(RouterSection.model_fields["signature"].annotation)


class SchedulePoint(_Section):
    """A wanted pool size from some time on."""

    at_s: float = Field(ge=0)
    """Virtual seconds since the start."""

    replicas: int = Field(ge=1)
    """Decode replicas wanted from then on."""


class AutoscalingSection(_Section):
    """How many decode replicas there are: by plan, or by load."""

    schedule: list[SchedulePoint] = Field(default_factory=list)
    """Pool sizes by time; if empty, the pool follows the load."""

    target_load: float = Field(default=32.0, gt=0)
    """By load: requests in flight wanted on each replica."""

    min_replicas: int = Field(default=1, ge=1)
    """By load: least number of replicas."""

    max_replicas: int = Field(default=32, ge=1)
    """By load: greatest number of replicas."""

    interval_s: float = Field(default=10.0, gt=0)
    """By load: seconds between two looks at the load."""

    down_delay_s: float = Field(default=300.0, ge=0)
    """By load: seconds that fewer replicas must have sufficed before one is taken away."""

    start_delay_s: float = Field(default=60.0, ge=0)
    """Seconds from asking for a replica to its first request: start, weights, warm-up."""


class FailureSection(_Section):
    """A decode replica that dies; its requests start over."""

    at_s: float = Field(ge=0)
    """Virtual seconds since the start."""

    replica: int = Field(ge=0)
    """Which of the replicas alive then, in the order they came; counted round if too large."""

    restart_after_s: float | None = Field(default=None, gt=0)
    """Seconds until it is back, empty; None: never."""


class RetrySection(_Section):
    """What happens to requests of a dead replica."""

    max_retries: int = Field(default=2, ge=0)
    """Attempts after the first; then the request counts as failed."""

    delay_s: float = Field(default=1.0, ge=0)
    """Seconds until the loss is noticed and the request is prefilled again."""


class PaperSection(_Section):
    """Which published figures to print beside ours (ELDR, arXiv 2607.00466, and its artifact)."""

    study: Literal["rates", "pool", "tau", "signature", "clustering"]
    """Which table."""

    workload: Literal["task", "lang"]
    """Which workload of the table."""

    model: Literal["qwen", "gptoss", "gemma"]
    """Which model of the table."""


class SimulationConfig(_Section):
    """One simulation: a grid of rates, policies, seeds and, if asked for, swept fields."""

    name: str = Field(min_length=1)
    """Title of the report."""

    workload: WorkloadSection
    """Which experts requests use."""

    traffic: TrafficSection
    """When requests arrive."""

    prefill: PrefillSection = Field(default_factory=PrefillSection)
    """Replicas that compute prompts."""

    transfer: TransferSection = Field(default_factory=TransferSection)
    """Hand-over of KV."""

    decode: DecodeSection = Field(default_factory=DecodeSection)
    """Replicas that generate answers."""

    step_time: StepTimeSection = Field(default_factory=StepTimeSection)
    """Time of a decode step."""

    router: RouterSection = Field(default_factory=RouterSection)
    """How a decode replica is chosen."""

    autoscaling: AutoscalingSection | None = None
    """Changes of the decode pool; None keeps it fixed."""

    failures: list[FailureSection] = Field(default_factory=list)
    """Decode replicas that die."""

    retry: RetrySection = Field(default_factory=RetrySection)
    """What happens to requests of a dead replica."""

    fidelity: Literal["expected", "exact"] = "expected"
    """expected: distinct experts from request profiles; exact: union of tokens, step by step."""

    seeds: int = Field(default=3, ge=1)
    """Repetitions with other arrivals and draws; intervals are over them."""

    paper: PaperSection | None = None
    """Which published figures to print beside ours."""

    sweep: dict[str, list[Any]] = Field(default_factory=dict)
    """Dotted field to its values, such as `router.tau: [0.0, 0.1]`; several make a grid."""

    @model_validator(mode="after")
    def _check_relations(self) -> Self:
        checks = (_workload_problems, _decode_problems, _law_problems, _scaling_problems)
        if problems := [problem for check in checks for problem in check(self)]:
            raise RelationError(problems)
        return self

    def variants(self) -> Iterator[tuple[dict[str, Any], SimulationConfig]]:
        """Swept values and the configuration with them; one entry without a sweep.

        Raises:
            ConfigError: a swept field does not exist, or a value is refused.
        """
        for values in itertools.product(*self.sweep.values()):
            chosen = dict(zip(self.sweep, values, strict=True))
            yield chosen, self.with_values(chosen)

    def with_values(self, values: dict[str, Any], *, keep_sweep: bool = False) -> SimulationConfig:
        """A copy with some dotted fields replaced, checked like a file.

        Args:
            values: dotted field to its value.
            keep_sweep: leave the sweep in; without it the copy is one of its variants.

        Raises:
            ConfigError: a field does not exist, or a value is refused.
        """
        data = self.model_dump(mode="python", by_alias=True)
        for field, value in values.items():
            _set(data, field, value)
        if not keep_sweep:
            data["sweep"] = {}
        return _validated(data, f"{self.name}, {values}" if values else self.name)


def load_simulation(path: str | Path) -> SimulationConfig:
    """Read and check a simulation; `workload.trace` and others become absolute paths.

    Raises:
        ConfigError: anything is wrong; the text names every problem that was found.
    """
    file = Path(path)
    raw = read_yaml(file)
    base = file.resolve().parent
    for section, key in (
        ("workload", "trace"),
        ("workload", "trace_meta"),
        ("step_time", "file"),
    ):
        part = raw.get(section)
        if isinstance(part, dict) and isinstance(given := part.get(key), str) and given:
            part[key] = str((base / os.path.expanduser(given)).resolve())
    config = _validated(raw, str(path))
    for _ in config.variants():  # refuses a bad value of a sweep before anything runs
        pass
    return config


def _validated(data: dict[str, Any], where: str) -> SimulationConfig:
    try:
        return SimulationConfig.model_validate(data)
    except ValidationError as err:
        raise ConfigError(where, problems_of(err, SimulationConfig)) from None


def _set(data: dict[str, Any], field: str, value: Any) -> None:
    *sections, key = field.split(".")
    part: Any = data
    for section in sections:
        part = part.get(section) if isinstance(part, dict) else None
    if not isinstance(part, dict) or key not in part:
        known = ", ".join(f"{s}.{k}" for s, v in data.items() if isinstance(v, dict) for k in v)
        text = f"no field {field!r}: sweep one of {known}"
        raise ConfigError("sweep", [Problem(field, text)])
    part[key] = value


def _workload_problems(config: SimulationConfig) -> list[Problem]:
    workload, problems = config.workload, []
    if workload.source == "trace":
        if workload.trace is None:
            problems.append(Problem("workload.trace", "is required when workload.source is trace"))
        if workload.trace_min_tokens <= workload.trace_prompt_tokens:
            text = (
                f"must be > trace_prompt_tokens ({workload.trace_prompt_tokens}), got "
                f"{workload.trace_min_tokens}: something must be left to decode"
            )
            problems.append(Problem("workload.trace_min_tokens", text))
    elif workload.trace is not None:
        text = "is given and workload.source is synthetic: remove it or set source: trace"
        problems.append(Problem("workload.trace", text))
    if workload.source == "synthetic" and workload.top_k >= workload.num_experts:
        text = f"must be < num_experts ({workload.num_experts}), got {workload.top_k}"
        problems.append(Problem("workload.top_k", text))
    return problems


def _decode_problems(config: SimulationConfig) -> list[Problem]:
    decode = config.decode
    if decode.cache_slots is not None and config.fidelity == "exact":
        text = "is given with fidelity: exact, which does not model caches: drop one of the two"
        return [Problem("decode.cache_slots", text)]
    if decode.cache_slots is not None and config.step_time.per_load_ms == 0:
        text = "is 0 while decode.cache_slots is set: loads would cost nothing; give their time"
        return [Problem("step_time.per_load_ms", text)]
    return []


def _law_problems(config: SimulationConfig) -> list[Problem]:
    from calibration.simulation.laws import LAWS

    law, file = config.step_time.law, config.step_time.file
    if law not in ("linear", "file", *LAWS):
        accepted = ", ".join(["linear", "file", *LAWS])
        return [Problem("step_time.law", f"must be one of {accepted}, got {law!r}")]
    if (law == "file") != (file is not None):
        return [Problem("step_time.file", "is for law: file, and required there")]
    return []


def _scaling_problems(config: SimulationConfig) -> list[Problem]:
    scaling = config.autoscaling
    if scaling is None:
        return []
    times = [point.at_s for point in scaling.schedule]
    if times != sorted(set(times)):
        text = f"at_s must rise from point to point, got {times}"
        return [Problem("autoscaling.schedule", text)]
    if scaling.min_replicas > scaling.max_replicas:
        text = f"must be <= max_replicas ({scaling.max_replicas}), got {scaling.min_replicas}"
        return [Problem("autoscaling.min_replicas", text)]
    return []
