"""The one configuration schema: what an application is made of, with types, units and defaults.

`load_config` reads a YAML file; `eldr config check FILE` prints what it resolves to. A section is
one frozen model; what single fields cannot say is checked in `EldrConfig`, and what needs files
(the model, the calibration artifact) in `load_config`, so that a replica that is handed a resolved
configuration does not read them again.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from app.config_errors import ConfigError, Problem, RelationError, problems_of, read_yaml
from app.model_facts import (
    ArtifactFacts,
    FactsError,
    ModelFacts,
    artifact_facts,
    model_facts,
    plan_facts,
    score_facts,
)

__all__ = [
    "CacheConfig",
    "ConfigError",
    "DecodeConfig",
    "EldrConfig",
    "EngineConfig",
    "HttpConfig",
    "KvTransferConfig",
    "LimitsConfig",
    "ModelConfig",
    "PlacementConfig",
    "PrefillConfig",
    "RefitConfig",
    "RouterConfig",
    "load_config",
]

POLICIES_WITH_ARTIFACT = (
    "live",
    "band",
    "soft",
    "domain",
)  # domain: its map of domains to clusters
# A capture row is one uint8 a block, layer and expert, and one token adds at most 1 to it.
MAX_CAPTURE_BLOCK_SIZE = 255
MIN_LEASE_S = 5.0
# Between a decode replica's being chosen and its engine's first lease renewal: HTTP and tokenizing.
HANDOFF_MARGIN_S = 2.0
RESERVATION_MARGIN_S = 60.0

# vLLM arguments that a field of ours sets: two places for one value would disagree one day.
OWNED_ENGINE_KWARGS = {
    "kv_transfer_config": "section kv_transfer",
    "scheduler_cls": "router.capture (the capture needs a scheduler of its own)",
    "worker_cls": "cache.enabled (the cache needs a worker of its own)",
    "additional_config": "section cache",
    "model": "model.path",
    "served_model_name": "model.served_name",
    "dtype": "model.dtype",
    "max_model_len": "model.max_model_len",
    "trust_remote_code": "model.trust_remote_code",
    "enable_auto_tool_choice": "model.enable_auto_tool_choice",
    "tool_call_parser": "model.tool_call_parser",
    "tensor_parallel_size": "tensor_parallel_size of the same section",
    "max_num_seqs": "max_num_seqs of the same section",
    "max_num_batched_tokens": "max_num_batched_tokens of the same section",
    "block_size": "block_size of the same section",
    "enforce_eager": "enforce_eager of the same section",
    "enable_prefix_caching": "enable_prefix_caching of the same section",
    # Prefill always asks with tool_choice "none"; leaving tools out then would render another
    # prompt there than on the decode replica, and decode would read the wrong KV.
    "exclude_tools_when_tool_choice_none": "no field: it breaks the KV hand-off of tool calls",
}
OWNED_ENV = {
    "VLLM_NIXL_SIDE_CHANNEL_PORT": "kv_transfer.side_channel_port_base",
    "VLLM_CPU_KVCACHE_SPACE": "kv_cache_gib of the same section",
    "OMP_NUM_THREADS": "omp_threads of the same section",
    "ELDR_EPLB_PLAN": "placement.plan",
    "ELDR_EPLB_FINGERPRINT": "placement.plan",
    "ELDR_EPLB_MAX_AGE_S": "placement.max_age_s",
}

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


class _Section(BaseModel):
    """Base of all sections: frozen, unknown keys refused, no silent conversion of types."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        populate_by_name=True,
        use_attribute_docstrings=True,
        protected_namespaces=(),
    )


class ModelConfig(_Section):
    """What is served."""

    path: str = Field(min_length=1)
    """Local model folder (relative paths count from the YAML file) or a hub id `org/name`."""

    served_name: str = Field(min_length=1)
    """Model name that clients send; a request for another name is answered 404."""

    dtype: Literal["auto", "half", "float16", "bfloat16", "float", "float32"] = "auto"
    """Type of weights and activations; auto takes what the model folder says."""

    max_model_len: int | None = Field(default=None, ge=1)
    """Longest prompt plus answer, in tokens; None takes the model's own maximum."""

    enable_auto_tool_choice: bool = False
    """Lets the model decide to call tools; off because it needs the right `tool_call_parser`."""

    tool_call_parser: str | None = None
    """vLLM's parser of the model's tool-call syntax, for example `hermes`; None parses no calls."""

    trust_remote_code: bool = False
    """Runs Python code shipped with the model; off because it is code of a stranger."""

    @property
    def is_local(self) -> bool:
        """Whether `path` names a folder rather than a model of the hub."""
        return not _HUB_ID.fullmatch(self.path)


class EngineConfig(_Section):
    """One pool of equal vLLM engines, one engine a replica."""

    num_replicas: int = Field(default=1, ge=1)
    """Engines in the pool; 1 is the smallest pool."""

    tensor_parallel_size: int = Field(default=1, ge=1)
    """Worker processes (on a GPU: devices) that one engine's layers are split over."""

    max_num_seqs: int = Field(default=64, ge=1)
    """Requests that one engine computes in the same step; 64 keeps a CPU's step time bearable."""

    max_num_batched_tokens: int | None = Field(default=None, ge=1)
    """Tokens that one engine computes in a step; None leaves vLLM's choice for the device."""

    block_size: int | None = Field(default=None, ge=1)
    """Tokens in a KV block, a multiple of 16 (CPU: of 32); None leaves vLLM's choice."""

    kv_cache_gib: int | None = Field(default=None, ge=1)
    """KV cache of one CPU engine, in whole GiB as vLLM reads it; None: 4 GiB; not for GPUs."""

    omp_threads: int | None = Field(default=None, ge=1)
    """Compute threads of one CPU engine; None shares the node's cores evenly; not for GPUs."""

    num_cpus: float = Field(default=0.5, ge=0)
    """CPUs that Ray reserves for a replica; below 1 so that several fit on a small machine."""

    num_gpus: float | None = Field(default=None, ge=0)
    """GPUs that Ray reserves for a replica; None: `tensor_parallel_size` on GPUs, 0 on CPU."""

    node_labels: dict[str, str] = Field(default_factory=dict)
    """Labels of the Ray nodes that may run a replica, such as `eldr-serve/pool: decode`; without
    any, all nodes may."""

    max_ongoing_requests: int = Field(default=1024, ge=1)
    """Requests that Serve lets one replica hold; high because vLLM queues them itself."""

    enforce_eager: bool | None = None
    """Skips compilation and CUDA graphs; None: on for CPU (faster start), off for GPU."""

    enable_prefix_caching: bool = True
    """Reuses KV blocks of a prompt's known beginning; on, since signatures stay exact with it."""

    engine_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Further vLLM engine arguments, passed as given; those that a field here sets are refused."""

    graceful_shutdown_timeout_s: float = Field(default=60.0, ge=0)
    """Seconds a stopping replica may take to end its streams and hand over its KV."""

    env: dict[str, str] = Field(default_factory=dict)
    """Extra environment variables of the engine's processes, for what vLLM reads only there."""

    @property
    def num_expert_ranks(self) -> int:
        """Ranks that share the experts of a layer; 1 without expert parallelism."""
        if not self.engine_kwargs.get("enable_expert_parallel"):
            return 1
        return self.tensor_parallel_size * _count(self.engine_kwargs, "data_parallel_size", 1)

    @property
    def has_eplb(self) -> bool:
        """Whether vLLM moves experts between ranks."""
        return bool(self.engine_kwargs.get("enable_eplb"))

    @property
    def num_redundant_experts(self) -> int:
        """Slots of all ranks beyond the experts, with EPLB."""
        eplb = self.engine_kwargs.get("eplb_config")
        return _count(eplb, "num_redundant_experts", 0) if isinstance(eplb, dict) else 0

    @field_validator("engine_kwargs")
    @classmethod
    def _refuse_owned_kwargs(cls, value: dict[str, Any]) -> dict[str, Any]:
        _refuse_owned(value, OWNED_ENGINE_KWARGS)
        return value

    @field_validator("env")
    @classmethod
    def _refuse_owned_env(cls, value: dict[str, str]) -> dict[str, str]:
        _refuse_owned(value, OWNED_ENV)
        return value


class PrefillConfig(EngineConfig):
    """Engines that compute prompts."""

    num_replicas: int = Field(default=1, ge=1)
    """Prefill replicas; 1, since prefill is rarely what a small installation lacks."""


class DecodeConfig(EngineConfig):
    """Engines that generate answers."""

    num_replicas: int = Field(default=2, ge=1)
    """Decode replicas; 2, the fewest between which routing can choose."""


class RefitConfig(_Section):
    """When the router fits its centroids anew, from the signatures of recent requests."""

    when: Literal["never", "pool", "online"] = "pool"
    """never; pool: when the number of decode replicas changes; online: also when traffic drifts,
    which policy `live` follows by itself."""

    settle_s: float = Field(default=5.0, ge=0)
    """Seconds without a change of the pool before it is fitted to; 5 outlasts one replica's fit."""

    window_s: float = Field(default=30.0, gt=0)
    """Seconds of traffic that a refit looks at; 30 for enough requests on a small installation."""

    interval_s: float = Field(default=10.0, gt=0)
    """Seconds between looks for drift, and before a refit that failed is tried again."""

    max_drop: float = Field(default=0.05, gt=0, le=1)
    """Drop of the mean similarity since the last refit, in cosine units, that counts as drift."""

    max_skew_ratio: float = Field(default=1.5, gt=1)
    """Growth of the busiest centroid's share since the last refit that counts as drift, a ratio."""

    min_gain: float = Field(default=0.01, ge=0, le=1)
    """Mean similarity, in cosine units, that a refit for drift must add on held-out requests."""


class RouterConfig(_Section):
    """How a decode replica is chosen."""

    policy: Literal["random", "rr", "jsq", "p2c", "domain", "band", "soft", "live"] = "live"
    """Routing rule; `live` weighs likeness to what runs on a replica against its load, `soft` does
    so with fixed centroids, `band` is the ELDR paper's rule."""

    tau: float = Field(default=0.1, ge=0, le=1)
    """Width of the locality band of policy `band`, in cosine units; 0.1 as in the ELDR paper."""

    lambda_: float | None = Field(default=None, ge=0, alias="lambda")
    """Weight of load against similarity, no unit; 0: similarity only; None: 0.5 in `soft`, 0.4 in
    `live`, 0.12 there with an expert cache (0.2 if resident_weight is 0)."""

    max_load: float | None = Field(default=None, ge=1)
    """Most load of a replica in policy `live`, as a multiple of the mean; None: 1.5, which costs no
    locality, 2 with an expert cache."""

    resident_weight: float | None = Field(default=None, ge=0)
    """What policy `live` adds, in cosine, for a replica whose expert cache holds all experts of the
    prompt; 0: caches do not count; None: 1.3 with an expert cache, 0 without."""

    seed: int = Field(default=0, ge=0)
    """Seed of random choices and tie-breaks; fixed so that a run can be repeated."""

    artifact: str | None = None
    """Calibration artifact, a folder (relative paths count from the YAML file); None has none."""

    capture: bool = True
    """Counts expert choices in prefill engines; off, requests are routed by load alone."""

    select_timeout_s: float = Field(default=0.5, gt=0)
    """Seconds to wait for the router; then the least loaded replica is taken and counted."""

    reservation_ttl_s: float | None = Field(default=None, gt=0)
    """Seconds until a load reservation that nobody released expires; None: request timeout + 60."""

    domain_header: str = Field(default="x-eldr-domain", pattern=r"^[a-z0-9-]+$")
    """Request header with the traffic's domain, read by policy `domain` and for reports."""

    reservoir_size: int = Field(default=1024, ge=1)
    """Recent signatures kept for refits; 1024 covers 16 decode replicas with 64 each."""

    ramp_s: float = Field(default=2.0, ge=0)
    """Seconds until a new decode replica's emptiness counts in full; longer ones cost locality."""

    refit: RefitConfig = Field(default_factory=RefitConfig)
    """When centroids are fitted anew; by default when the number of decode replicas changes."""


class CacheConfig(_Section):
    """Expert cache of the decode engines: B experts of each MoE layer stay on the device."""

    enabled: bool = False
    """Keeps the other experts in host memory and loads them when they are chosen."""

    slots: int | None = Field(default=None, ge=1)
    """B, experts of a layer that stay on the device (with expert parallelism: of each rank)."""

    fraction: float = Field(default=0.5, gt=0, le=1)
    """B as a share of a layer's experts, rounded up; counts where `slots` is not given."""

    policy: Literal["lru", "lfu", "lrfu", "static", "temporal", "spatio", "learned"] = "lrfu"
    """What stays: by use, by a fixed order, by the gate (spatio loads ahead), by training."""

    lrfu_lambda: float = Field(default=0.03, ge=0, le=1)
    """Of policy lrfu: 0 counts uses, 1 looks at the last use alone."""

    budget: int = Field(default=0, ge=0)
    """R, candidates that policy spatio checks before each layer runs; 0 for the others."""

    store_dir: str = Field(default="~/.cache/eldr-serve/experts", min_length=1)
    """Folder of the store of all experts, one file a model; relative paths as for the model."""

    score_file: str | None = None
    """.npz file with trained routers or the order of policy static, or the folder that
    `eldr cache train` wrote for policy learned; None scores by the gates."""

    adaptive: bool = False
    """Lets each node's manager lower B under memory pressure and set R by the link's headroom."""


class PlacementConfig(_Section):
    """Which expert-parallel rank of a decode engine has which experts.

    Plans reach GPU engines by vLLM's EPLB, and CPU engines by their expert cache.
    """

    plan: str | None = None
    """Plan of all decode engines, a file of `eldr cache place` (relative paths count from the YAML
    file), which may change while engines with EPLB run; None: as vLLM does."""

    max_age_s: float | None = Field(default=None, gt=0)
    """Seconds since a plan was made after which EPLB plans by itself again; None: never."""

    managed: bool = False
    """Lets each node's manager plan for its decode replicas, by the experts that their clusters are
    expected to use and by those that they used; off, as moves cost time."""

    folder: str = Field(default="~/.cache/eldr-serve/placement", min_length=1)
    """Folder of the managers' plan files, one a replica; relative paths as for `plan`."""

    interval_s: float = Field(default=30.0, gt=0)
    """Seconds between two looks of a manager at a replica; 30 give some hundred steps to count."""

    batch: int | None = Field(default=None, ge=1)
    """Requests that decode in one step, for expected use; None: `decode.max_num_seqs`."""

    move_price: float = Field(default=67.0, ge=0)
    """Cost of moving an expert, in reads of one from device memory; 67 for an H200 on 400 Gb/s."""

    horizon_steps: int = Field(default=3000, ge=1)
    """Decode steps in which a move must pay; 3000 is the default of vLLM's EPLB between two."""

    hysteresis: float = Field(default=1.5, ge=1)
    """Least gain of moves, as a multiple of their cost; 1.5 leaves unchanged traffic alone."""


class KvTransferConfig(_Section):
    """How KV blocks go from prefill to decode engines (NIXL)."""

    progress_thread: Literal["auto", True, False] = "auto"
    """NIXL's progress thread; auto: off on CPU, where it spins a core per engine, on for GPUs."""

    lease_s: float = Field(default=60.0, ge=MIN_LEASE_S)
    """Seconds a prefill engine holds finished KV that decode has not asked for; 60 as margin."""

    buffer_device: Literal["auto", "cpu", "cuda"] = "auto"
    """Memory that transfers go through; auto: where the KV cache is."""

    side_channel_port_base: int = Field(default=20000, ge=1024, le=65535)
    """First port of the engines' NIXL handshakes, one a worker; clear of Ray's default ports."""


class HttpConfig(_Section):
    """Where clients connect."""

    host: str = Field(default="127.0.0.1", min_length=1)
    """Address to listen on; only this machine by default, since no API keys are set either."""

    port: int = Field(default=8000, ge=1, le=65535)
    """TCP port of the OpenAI API; 8000 as for vLLM."""

    num_ingress_replicas: int = Field(default=1, ge=1)
    """Processes that relay streams; one carries some thousand tokens a second."""

    haproxy: bool = True
    """Puts HAProxy before the ingress instead of Serve's Python proxy, which limits throughput."""


class LimitsConfig(_Section):
    """What one client may ask for."""

    max_body_bytes: int = Field(default=4 * 1024 * 1024, ge=1024)
    """Largest request body in bytes; 4 MiB is about a million tokens of text."""

    max_n: int = Field(default=16, ge=1)
    """Largest `n` (answers, or beams) of a request; each one costs a decode slot."""

    request_timeout_s: float = Field(default=300.0, gt=0)
    """Seconds from a request's arrival to its end, after which it is cancelled."""

    prefill_timeout_s: float = Field(default=120.0, gt=0)
    """Seconds one prefill attempt may take; below the request timeout, to leave time to decode."""

    api_keys_env: str | None = None
    """Name of an environment variable with comma-separated API keys; None asks for no key."""

    requests_per_minute: int | None = Field(default=None, ge=1)
    """Requests that one API key may start in a minute; None sets no limit."""

    max_retries: int = Field(default=2, ge=0)
    """Further attempts on other replicas before the first token went out; 2 bounds the overload."""

    @field_validator("api_keys_env")
    @classmethod
    def _check_env_name(cls, value: str | None) -> str | None:
        if value is not None and not _ENV_NAME.fullmatch(value):
            # The value stays out of the text: it may be a key, pasted by mistake.
            raise ValueError(
                f"must be the name of an environment variable such as ELDR_API_KEYS, got "
                f"{len(value)} characters that are none: put the keys themselves in that variable"
            )
        return value


class EldrConfig(_Section):
    """A whole application."""

    app_name: str = Field(default="eldr", pattern=r"^[A-Za-z0-9_-]+$")
    """Name of the Serve application and prefix of its actors; change it to run two in a cluster."""

    device: Literal["auto", "cpu", "gpu"] = "auto"
    """What engines compute on; auto takes GPUs if the cluster has any."""

    model: ModelConfig
    """What is served; the one section without defaults."""

    prefill: PrefillConfig = Field(default_factory=PrefillConfig)
    """Engines that compute prompts; one by default."""

    decode: DecodeConfig = Field(default_factory=DecodeConfig)
    """Engines that generate answers; two by default."""

    router: RouterConfig = Field(default_factory=RouterConfig)
    """How a decode replica is chosen; by expert locality and load by default."""

    cache: CacheConfig = Field(default_factory=CacheConfig)
    """Which experts decode engines keep on the device; all of them by default."""

    placement: PlacementConfig = Field(default_factory=PlacementConfig)
    """Where experts are on the ranks of decode engines; as vLLM has them by default."""

    kv_transfer: KvTransferConfig = Field(default_factory=KvTransferConfig)
    """How KV goes from prefill to decode; the defaults suit one machine."""

    http: HttpConfig = Field(default_factory=HttpConfig)
    """Where clients connect; this machine only by default."""

    limits: LimitsConfig = Field(default_factory=LimitsConfig)
    """What one client may ask for; no keys and no rate limit by default."""

    @property
    def reservation_ttl_s(self) -> float:
        """`router.reservation_ttl_s`, or its default from the request timeout; seconds."""
        given = self.router.reservation_ttl_s
        return self.limits.request_timeout_s + RESERVATION_MARGIN_S if given is None else given

    def to_yaml(self) -> str:
        """The configuration with all defaults written out; loading it gives an equal one."""
        data = self.model_dump(mode="json", by_alias=True)
        data["router"]["reservation_ttl_s"] = self.reservation_ttl_s
        return str(yaml.safe_dump(data, sort_keys=False, allow_unicode=True))

    @model_validator(mode="after")
    def _check_relations(self) -> Self:
        checks = (
            _model_problems,
            _engine_problems,
            _router_problems,
            _cache_problems,
            _placement_problems,
            _deadline_problems,
        )
        if problems := [problem for check in checks for problem in check(self)]:
            raise RelationError(problems)
        return self


def load_config(path: str | Path) -> EldrConfig:
    """Read, resolve and check a configuration file.

    `model.path` (when such a folder exists) and `router.artifact` become absolute, counted from
    the folder of the file.

    Raises:
        ConfigError: anything is wrong; the text names every problem that was found.
    """
    file = Path(path)
    raw = read_yaml(file)
    _resolve_paths(raw, file.resolve().parent)
    try:
        config = EldrConfig.model_validate(raw)
    except ValidationError as err:
        raise ConfigError(str(path), problems_of(err, EldrConfig)) from None
    if problems := _file_problems(config):
        raise ConfigError(str(path), problems)
    return config


def _resolve_paths(raw: dict[str, Any], base: Path) -> None:
    model, router = raw.get("model"), raw.get("router")
    if isinstance(model, dict) and isinstance(given := model.get("path"), str) and given:
        folder = base / os.path.expanduser(given)
        # A name that is no folder stays as it is: it may be a hub id.
        if folder.is_dir() or not _HUB_ID.fullmatch(given):
            model["path"] = str(folder.resolve())
    if isinstance(router, dict) and isinstance(given := router.get("artifact"), str) and given:
        router["artifact"] = str((base / os.path.expanduser(given)).resolve())
    for name, key in (
        ("cache", "store_dir"),
        ("cache", "score_file"),
        ("placement", "plan"),
        ("placement", "folder"),
    ):
        # "~" stays: it is the home of whoever runs the engine.
        section = raw.get(name)
        if isinstance(section, dict) and isinstance(given := section.get(key), str):
            section[key] = given if given.startswith("~") else str((base / given).resolve())


def _refuse_owned(value: Mapping[str, Any], owned: Mapping[str, str]) -> None:
    if clashes := [f"{key} is set by {owned[key]}" for key in value if key in owned]:
        raise ValueError(f"{'; '.join(clashes)}: remove it here")


def _count(mapping: Mapping[str, Any], key: str, default: int) -> int:
    """A number among vLLM's own arguments; vLLM refuses what is none."""
    value = mapping.get(key, default)
    return value if type(value) is int else default


def _model_problems(config: EldrConfig) -> list[Problem]:
    model = config.model
    if model.enable_auto_tool_choice and model.tool_call_parser is None:
        return [
            Problem(
                "model.tool_call_parser",
                "is required when model.enable_auto_tool_choice is true: name the parser of the "
                "model's tool-call syntax, for example hermes",
            )
        ]
    return []


def _engine_problems(config: EldrConfig) -> list[Problem]:
    problems = []
    multiple = 32 if config.device == "cpu" else 16
    for section, engine in (("prefill", config.prefill), ("decode", config.decode)):
        size, tokens = engine.block_size, engine.max_num_batched_tokens
        if tokens is not None and tokens < engine.max_num_seqs:
            text = (
                f"must be >= max_num_seqs ({engine.max_num_seqs}), got {tokens}: a step needs a "
                "token of each request; raise it or lower max_num_seqs"
            )
            problems.append(Problem(f"{section}.max_num_batched_tokens", text))
        if size is not None and size % multiple:
            text = f"must be a multiple of {multiple} on device {config.device}, got {size}"
            problems.append(Problem(f"{section}.block_size", text))
        if size is not None and config.router.capture and size > MAX_CAPTURE_BLOCK_SIZE:
            text = (
                f"must be <= {MAX_CAPTURE_BLOCK_SIZE} while router.capture is on (a count per "
                f"block is one byte), got {size}: lower it or switch capture off"
            )
            problems.append(Problem(f"{section}.block_size", text))
        if config.device == "gpu" and engine.kv_cache_gib is not None:
            text = (
                "sizes CPU engines and device is gpu: remove it, and set "
                "engine_kwargs.gpu_memory_utilization if the default is not right"
            )
            problems.append(Problem(f"{section}.kv_cache_gib", text))
        if config.device == "gpu" and engine.omp_threads is not None:
            text = "is for CPU engines and device is gpu: remove it"
            problems.append(Problem(f"{section}.omp_threads", text))
        if config.device == "cpu" and config.router.capture and engine.enforce_eager is False:
            text = (
                "must not be false on device cpu while router.capture is on: vLLM compiles the "
                "routers there, and their choices cannot be seen; leave it out or switch capture "
                "off"
            )
            problems.append(Problem(f"{section}.enforce_eager", text))
        if config.device == "cpu" and engine.num_gpus:
            text = f"is {engine.num_gpus} and device is cpu: remove it or set device: gpu"
            problems.append(Problem(f"{section}.num_gpus", text))
    return problems + _port_problems(config)


def _port_problems(config: EldrConfig) -> list[Problem]:
    pools = (config.prefill, config.decode)
    num_ports = sum(pool.num_replicas * pool.tensor_parallel_size for pool in pools)
    first = config.kv_transfer.side_channel_port_base
    last = first + num_ports - 1
    path = "kv_transfer.side_channel_port_base"
    if last > 65535:
        return [
            Problem(
                path, f"{num_ports} workers need ports {first} to {last}, above 65535: lower it"
            )
        ]
    if first <= config.http.port <= last:
        text = f"workers use ports {first} to {last}, among them http.port {config.http.port}"
        return [Problem(path, f"{text}: move one of the two")]
    return []


def _router_problems(config: EldrConfig) -> list[Problem]:
    router, problems = config.router, []
    if router.policy in POLICIES_WITH_ARTIFACT:
        if router.artifact is None:
            text = (
                f"policy {router.policy!r} needs a calibration artifact: fit one with "
                "`eldr calibrate fit` and set it, or take a policy without one such as jsq"
            )
            problems.append(Problem("router.artifact", text))
        if not router.capture and router.policy != "domain":
            text = (
                f"must be true, got false: policy {router.policy!r} routes by captured expert "
                "counts; switch it on or take a policy without them such as jsq"
            )
            problems.append(Problem("router.capture", text))
    if router.resident_weight and not config.cache.enabled:
        text = (
            f"is {router.resident_weight:g} and decode engines have no expert cache: set "
            "cache.enabled to true, or leave it out"
        )
        problems.append(Problem("router.resident_weight", text))
    if router.refit.when != "never" and router.reservoir_size < config.decode.num_replicas:
        text = (
            f"must be >= decode.num_replicas ({config.decode.num_replicas}) for a refit, got "
            f"{router.reservoir_size}: raise it or set router.refit.when: never"
        )
        problems.append(Problem("router.reservoir_size", text))
    timeout = config.limits.request_timeout_s
    if config.reservation_ttl_s < timeout:
        text = (
            f"is {config.reservation_ttl_s:g} s, below limits.request_timeout_s {timeout:g} s: the "
            "load of running streams would be forgotten; raise it or leave it out"
        )
        problems.append(Problem("router.reservation_ttl_s", text))
    return problems


def _cache_problems(config: EldrConfig) -> list[Problem]:
    cache, problems = config.cache, []
    if not cache.enabled:
        if config.decode.engine_kwargs.get("enable_expert_parallel") and config.device == "cpu":
            text = (
                "must be true for decode.engine_kwargs.enable_expert_parallel on device cpu: "
                "vLLM's CPU kernel ignores which rank has an expert, and crashes; with all experts "
                "in slots set cache.fraction: 1"
            )
            return [Problem("cache.enabled", text)]
        return []
    if config.decode.has_eplb:
        text = (
            "must be false while decode.engine_kwargs.enable_eplb is true: both move experts, "
            "switch one of them off"
        )
        problems.append(Problem("cache.enabled", text))
    if config.decode.enforce_eager is False:
        text = (
            "must not be false while cache.enabled is true: a compiled graph cannot wait for a load"
        )
        problems.append(Problem("decode.enforce_eager", text))
    if cache.policy == "spatio" and not cache.budget:
        text = "must be >= 1 for policy spatio, got 0: raise it, or take policy temporal"
        problems.append(Problem("cache.budget", text))
    if cache.policy != "spatio" and cache.budget:
        text = f"is {cache.budget} and policy {cache.policy} loads nothing ahead: take spatio, or 0"
        problems.append(Problem("cache.budget", text))
    if cache.slots is not None and cache.budget > cache.slots:
        problems.append(_budget_problem(cache.budget, cache.slots))
    if cache.policy == "static" and cache.score_file is None:
        text = (
            "policy static needs a file with the array hotness_LE: set it, or take another policy"
        )
        problems.append(Problem("cache.score_file", text))
    if cache.policy == "learned" and cache.score_file is None:
        text = (
            "policy learned needs the folder that `eldr cache train` wrote: set it, or take "
            "another policy"
        )
        problems.append(Problem("cache.score_file", text))
    return problems


def _placement_problems(config: EldrConfig) -> list[Problem]:
    placement, decode, problems = config.placement, config.decode, []
    if placement.max_age_s is not None and (placement.plan is None or not decode.has_eplb):
        text = (
            "is for a plan that vLLM's EPLB reads: remove it, or set placement.plan and "
            "decode.engine_kwargs.enable_eplb"
        )
        problems.append(Problem("placement.max_age_s", text))
    if placement.plan is None and not placement.managed:
        return problems
    path = "placement.managed" if placement.managed else "placement.plan"
    if decode.num_expert_ranks < 2:
        text = (
            "is for experts on ranks: set enable_expert_parallel in decode.engine_kwargs and "
            "decode.tensor_parallel_size above 1, or remove it"
        )
        problems.append(Problem(path, text))
    elif config.cache.enabled and config.device == "gpu":
        text = (
            "must be false for a placement plan on device gpu, where experts on ranks are not "
            "cached: take decode.engine_kwargs.enable_eplb instead"
        )
        problems.append(Problem("cache.enabled", text))
    elif not config.cache.enabled and not decode.has_eplb:
        text = (
            "cannot reach the decode engines: set decode.engine_kwargs.enable_eplb: true, or on "
            "CPUs cache.enabled: true"
        )
        problems.append(Problem(path, text))
    if not config.model.is_local:
        text = (
            f"must be a model folder for a placement plan, which is checked against its "
            f"fingerprint, got {config.model.path}: download the model first"
        )
        problems.append(Problem("model.path", text))
    return problems + (_managed_problems(config) if placement.managed else [])


def _managed_problems(config: EldrConfig) -> list[Problem]:
    problems = []
    if config.placement.plan is not None:
        text = "must be left out while placement.managed is true: managers make plans themselves"
        problems.append(Problem("placement.plan", text))
    if config.router.artifact is None:
        text = (
            "must be set for placement.managed, which plans for its clusters: fit one with "
            "`eldr calibrate fit`"
        )
        problems.append(Problem("router.artifact", text))
    if config.decode.num_expert_ranks > config.decode.tensor_parallel_size > 1:
        text = (
            "must be false with data_parallel_size in decode.engine_kwargs, where ranks decode "
            "requests of their own: take a plan"
        )
        problems.append(Problem("placement.managed", text))
    return problems


def _budget_problem(budget: int, slots: int) -> Problem:
    return Problem("cache.budget", f"must be <= {slots}, the slots of a layer, got {budget}")


def _deadline_problems(config: EldrConfig) -> list[Problem]:
    limits, problems = config.limits, []
    if limits.prefill_timeout_s > limits.request_timeout_s:
        text = (
            f"is {limits.prefill_timeout_s:g} s, above limits.request_timeout_s "
            f"{limits.request_timeout_s:g} s: lower it, prefill is a part of the request"
        )
        problems.append(Problem("limits.prefill_timeout_s", text))
    # From the end of prefill until a decode engine renews the lease: choose, maybe several times.
    wait_s = config.router.select_timeout_s * (1 + limits.max_retries) + HANDOFF_MARGIN_S
    if config.kv_transfer.lease_s < wait_s:
        text = (
            f"is {config.kv_transfer.lease_s:g} s, below the {wait_s:g} s that may pass between "
            "prefill and decode (router.select_timeout_s * (1 + limits.max_retries) + "
            f"{HANDOFF_MARGIN_S:g}): raise it, or KV is freed before decode reads it"
        )
        problems.append(Problem("kv_transfer.lease_s", text))
    return problems


def _file_problems(config: EldrConfig) -> list[Problem]:
    """What the model folder and the artifact say against the configuration."""
    problems: list[Problem] = []
    model: ModelFacts | None = None
    artifact: ArtifactFacts | None = None
    if config.model.is_local:
        try:
            model = model_facts(config.model.path)
        except FactsError as err:
            text = f"{err}; give a model folder or a hub id org/name"
            problems.append(Problem("model.path", text))
    if config.router.artifact is not None:
        try:
            artifact = artifact_facts(config.router.artifact)
        except FactsError as err:
            problems.append(Problem("router.artifact", str(err)))
    if model:
        problems += _model_fact_problems(config, model)
    if artifact:
        problems += _artifact_problems(config, artifact, model)
    if config.cache.enabled and config.cache.policy == "learned":
        problems += _score_problems(config, model)
    if model and config.placement.plan is not None:
        problems += _plan_problems(config, config.placement.plan, model)
    return problems


def _score_problems(config: EldrConfig, model: ModelFacts | None) -> list[Problem]:
    """The learned score against the model; `ScoreTable.check` asks the same of the engine."""
    assert config.cache.score_file is not None
    try:
        score = score_facts(os.path.expanduser(config.cache.score_file))
    except FactsError as err:
        return [Problem("cache.score_file", str(err))]
    if model is None:
        return []
    shape = (model.num_moe_layers, model.num_experts)
    if (score.num_layers, score.num_experts) == shape and score.fingerprint in (
        None,
        model.fingerprint,
    ):
        return []
    text = (
        f"score is for {score.model_id} ({score.num_layers} MoE layers, {score.num_experts} "
        f"experts, fingerprint {score.fingerprint or 'unknown'}), but {config.model.path} has "
        f"{model.num_moe_layers}, {model.num_experts} and {model.fingerprint}: train one for it "
        "with `eldr cache train`"
    )
    return [Problem("cache.score_file", text)]


def _model_fact_problems(config: EldrConfig, facts: ModelFacts) -> list[Problem]:
    problems: list[Problem] = []
    if config.router.capture and not facts.is_moe:
        text = (
            f"{config.model.path} is not a Mixture-of-Experts model (config.json has no "
            "num_experts, num_local_experts or n_routed_experts above 1): serve another model, or "
            "set router.capture: false and a policy such as jsq"
        )
        problems.append(Problem("model.path", text))
    if config.cache.enabled:
        problems += _slot_problems(config, facts)
    length, maximum = config.model.max_model_len, facts.max_position_embeddings
    if length is not None and maximum is not None and length > maximum:
        text = f"must be <= {maximum}, the model's max_position_embeddings, got {length}"
        problems.append(Problem("model.max_model_len", text))
    return problems


def _slot_problems(config: EldrConfig, facts: ModelFacts) -> list[Problem]:
    """B against the experts of the model; what one rank holds is known to the engine alone."""
    cache = config.cache
    if not facts.is_moe:
        text = f"must be false: {config.model.path} is not a Mixture-of-Experts model"
        return [Problem("cache.enabled", text)]
    slots = math.ceil(cache.fraction * facts.num_experts) if cache.slots is None else cache.slots
    path = "cache.fraction" if cache.slots is None else "cache.slots"
    got = f"got {cache.fraction:g}, which is {slots}" if cache.slots is None else f"got {slots}"
    if slots < facts.top_k:
        text = (
            f"must give >= {facts.top_k} slots, since a token uses {facts.top_k} experts of a "
            f"layer at once, {got}: raise it"
        )
        return [Problem(path, text)]
    if slots > facts.num_experts:
        text = f"must be <= {facts.num_experts}, the experts of a layer, {got}: lower it"
        return [Problem(path, text)]
    if cache.slots is None and cache.budget > slots:
        return [_budget_problem(cache.budget, slots)]
    return []


def _plan_problems(config: EldrConfig, plan: str, model: ModelFacts) -> list[Problem]:
    file, decode = Path(plan).expanduser(), config.decode
    if decode.has_eplb and not file.exists():
        if file.parent.is_dir():
            return []  # EPLB takes it when it comes
        text = f"{file.parent} is no folder: create it, or plan with `eldr cache place`"
        return [Problem("placement.plan", text)]
    try:
        facts = plan_facts(file)
    except FactsError as err:
        return [Problem("placement.plan", str(err))]
    num_slots = model.num_experts + decode.num_redundant_experts
    planned = (facts.fingerprint, facts.num_layers, facts.num_slots, facts.num_ranks)
    served = (model.fingerprint, model.num_moe_layers, num_slots, decode.num_expert_ranks)
    if planned == served:
        return []
    shape = "fingerprint {}, {} MoE layers, {} slots on {} ranks"
    text = (
        f"is for {shape.format(*planned)}, but decode engines run {shape.format(*served)}: make "
        "one for them with `eldr cache place`"
    )
    return [Problem("placement.plan", text)]


def _artifact_problems(
    config: EldrConfig, artifact: ArtifactFacts, model: ModelFacts | None
) -> list[Problem]:
    problems = []
    num_replicas = config.decode.num_replicas
    policy, when = config.router.policy, config.router.refit.when
    if policy in POLICIES_WITH_ARTIFACT and artifact.k != num_replicas:
        text = (
            f"artifact has K={artifact.k} centroids but decode.num_replicas is {num_replicas}: "
            f"refit with `eldr calibrate fit --k {num_replicas}`"
        )
        if policy == "domain":  # knows clusters by their index in the artifact
            problems.append(Problem("router.artifact", text))
        elif when == "never":
            text += ", or let the router do it with router.refit.when: pool"
            problems.append(Problem("router.artifact", text))
        elif artifact.num_signatures < num_replicas:
            text += (
                f"; the router cannot do it at start, from the artifact's {artifact.num_signatures}"
                " signatures: it needs one a replica"
            )
            problems.append(Problem("router.artifact", text))
    if model is None or not model.is_moe:
        return problems
    fitted = (artifact.num_layers, artifact.num_experts, artifact.top_k, artifact.fingerprint)
    served = (model.num_moe_layers, model.num_experts, model.top_k, model.fingerprint)
    if fitted != served:
        shape = "L={} MoE layers, E={} experts, top-{}, fingerprint {}"
        text = (
            f"artifact was fitted for {artifact.model_id} ({shape.format(*fitted)}) but model.path "
            f"is {config.model.path} ({shape.format(*served)}): capture and fit again with "
            "`eldr calibrate` for this model, or serve the other one"
        )
        problems.append(Problem("router.artifact", text))
    return problems
