"""Source of the Grafana dashboards: `python dashboards/panels.py` writes the JSON beside it.

A panel's description says what to do when it looks bad. Two habits of Ray shape the expressions: a
histogram's `_sum` is made up from the middles of its buckets, so means come from counters; and a
dead process's counters stay, so everything counted is shown as a rate.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
A = 'application=~"$application"'
M = 'model_name=~"$model"'
R = "[$__rate_interval]"
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}


@dataclass(frozen=True)
class Panel:
    """One time series panel: expressions with their legends.

    Attributes:
        title: at most five words.
        text: what it shows, and what to do when it is bad.
        unit: Grafana's name of the unit.
        queries: PromQL and legend of each series.
        red: value from which on the background turns red; None where only a person can tell.
        red_below: red is below that value, not above.
    """

    title: str
    text: str
    unit: str
    queries: Sequence[tuple[str, str]]
    red: float | None = None
    red_below: bool = False


def rate(name: str, labels: str, by: str = "") -> str:
    """Rate of a counter, summed over all but `by`."""
    return f"sum by ({by}) (rate({name}{{{labels}}}{R}))"


def quantiles(name: str, labels: str, by: str = "", legend: str = "") -> list[tuple[str, str]]:
    """P50 and P99 of a histogram, given by the name of its buckets."""
    groups = f"le, {by}" if by else "le"
    return [
        (f"histogram_quantile({q}, {rate(name, labels, groups)})", f"{text} {legend}".strip())
        for q, text in ((0.5, "P50"), (0.99, "P99"))
    ]


def ratio(over: str, under: str) -> str:
    return f"{over} / {under}"


def in_flight(role: str) -> list[tuple[str, str]]:
    """Requests held by each replica of a role."""
    expr = f'max by (replica) (ray_eldr_replica_requests{{{A}, role="{role}"}})'
    return [(expr, "{{replica}}")]


REQUESTS = "ray_eldr_requests_total"
OVERVIEW: dict[str, list[Panel]] = {
    "Requests": [
        Panel(
            "Requests by status",
            "Ended requests a second. 429: a key is over its limit. 499: the client went away. "
            "503: no engine is ready. 504: a deadline passed. 5xx: see Errors.",
            "reqps",
            [(rate(REQUESTS, A, "status"), "{{status}}")],
        ),
        Panel(
            "Errors",
            "Share of requests that ended with 5xx. Look at Replicas known, then at Retries and "
            "fallbacks, then at the log of the ingress (it names the request and the replica).",
            "percentunit",
            [
                (
                    f'(sum(rate({REQUESTS}{{{A}, status=~"5.."}}{R})) or vector(0)) '
                    f'/ sum(rate({REQUESTS}{{{A}, status!="499"}}{R}))',
                    "5xx",
                )
            ],
            red=0.01,
        ),
        Panel(
            "TTFT",
            "Request in to first byte out, streamed requests. When it rises: Time of phases says "
            "which phase takes it.",
            "s",
            quantiles("ray_eldr_ttft_seconds_bucket", A),
            red=5,
        ),
        Panel(
            "TPOT",
            "Time of one output token. Rises with the batch and its distinct experts. If all "
            "replicas are full, add decode replicas; if one is, see Skew.",
            "s",
            quantiles("ray_eldr_tpot_seconds_bucket", A),
            red=0.1,
        ),
        Panel(
            "Time of phases, P99",
            "prefill: queue and prompt; add prefill replicas. route: see Decision time. "
            "first_byte: KV transfer and the first decode step (the whole answer where it is not "
            "streamed); see KV transfers and Waiting in engines. stream: first to last byte.",
            "s",
            quantiles("ray_eldr_phase_seconds_bucket", A, "phase", "{{phase}}")[1:],
        ),
        Panel(
            "Whole requests",
            "Request in to last byte out. Follows the length of answers; compare with TPOT first.",
            "s",
            quantiles("ray_eldr_e2e_seconds_bucket", A),
        ),
    ],
    "Load": [
        Panel(
            "In flight, decode replicas",
            "Requests that each decode replica holds. A line that ends: the replica is gone; Serve "
            "replaces it. All at max_num_seqs: add replicas or shed load.",
            "short",
            in_flight("decode"),
        ),
        Panel(
            "In flight, prefill replicas",
            "Requests that each prefill replica holds. Growing: prompts come faster than they are "
            "computed; add prefill replicas.",
            "short",
            in_flight("prefill"),
        ),
        Panel(
            "Skew",
            "Fullest decode replica over the mean, as the router counts. Above 2 at high load: "
            "locality outweighs balance; raise router.lambda or lower router.max_load.",
            "short",
            [
                (
                    f'max by (application) (ray_eldr_router_load{{{A}, stat="max"}}) / clamp_min('
                    f'max by (application) (ray_eldr_router_load{{{A}, stat="mean"}}), 1)',
                    "max / mean",
                )
            ],
            red=2,
        ),
        Panel(
            "Replicas known",
            "Replicas that the router may choose. Fewer than configured: `eldr status`, then the "
            "log of the deployment. No line at all: the router is away (restarted by Ray).",
            "short",
            [(f"max by (role) (ray_eldr_router_replicas{{{A}}})", "{{role}}")],
            red=1,
            red_below=True,
        ),
        Panel(
            "Waiting in engines",
            "Requests that wait inside vLLM; no line while an engine is idle. Lasting: the engine "
            "is out of KV blocks or sequences; see KV cache in use.",
            "short",
            [(f"max by (ReplicaId) (ray_vllm_num_requests_waiting{{{M}}})", "{{ReplicaId}}")],
        ),
        Panel(
            "KV cache in use",
            "Share of KV blocks; no line while an engine is idle. Near 1: requests are preempted "
            "and computed again; add replicas or KV memory (decode.kv_cache_gib).",
            "percentunit",
            [(f"max by (ReplicaId) (ray_vllm_kv_cache_usage_perc{{{M}}})", "{{ReplicaId}}")],
            red=0.95,
        ),
        Panel(
            "Tokens",
            "Output tokens a second of each engine, a prefill engine's one a request among them.",
            "short",
            [(rate("ray_vllm_generation_tokens_total", M, "ReplicaId"), "{{ReplicaId}}")],
        ),
        Panel(
            "In flight, ingress",
            "Requests in the ingress. Far above the sum of both replica panels: the ingress is the "
            "bottleneck; raise http.num_ingress_replicas.",
            "short",
            [(f"sum by (kind) (ray_eldr_active_requests{{{A}}})", "{{kind}}")],
        ),
    ],
    "Router and KV": [
        Panel(
            "Decisions",
            "Decode replicas chosen a second, by why it went by load alone (none: it did not). "
            "bad_signature: prefill and artifact disagree; see Fallbacks in the README.",
            "reqps",
            [(rate("ray_eldr_router_selections_total", A, "fallback"), "{{fallback}}")],
        ),
        Panel(
            "Retries and fallbacks",
            "Attempts that failed, by phase, and answers not routed by signature, by reason. "
            "router_away: the actor is down or slow. Retries in decode: a replica died.",
            "reqps",
            [
                (rate("ray_eldr_retries_total", A, "phase"), "retry in {{phase}}"),
                (rate("ray_eldr_routing_fallbacks_total", A, "reason"), "{{reason}}"),
            ],
        ),
        Panel(
            "Decision time",
            "Inside the router, without the way there. Milliseconds: the pool is large or the node "
            "busy; give the router's node a free core.",
            "s",
            quantiles("ray_eldr_router_decision_seconds_bucket_total", A),
            red=0.01,
        ),
        Panel(
            "Reservation events",
            "expired: a release was lost (an ingress died). dropped_reservations: went with a "
            "replica. reselected: retries. unknown_releases: came after one of these. A steady "
            "rate of expired without deaths is a bug.",
            "short",
            [(rate("ray_eldr_router_reservation_events_total", A, "event"), "{{event}}")],
        ),
        Panel(
            "KV transfers",
            "Time of one pull of KV from prefill to decode. Rising with equal prompts: the link "
            "is full.",
            "s",
            quantiles("ray_vllm_nixl_xfer_time_seconds_bucket", M),
        ),
        Panel(
            "Prompt tokens by source",
            "local_compute belongs to prefill replicas. On a decode replica, which has "
            "external_kv_transfer too: it computes prompts again, for requests with n > 1 and the "
            "like (Retries and fallbacks), or after transfers that failed.",
            "short",
            [
                (
                    rate("ray_vllm_prompt_tokens_by_source_total", M, "ReplicaId, source"),
                    "{{source}} {{ReplicaId}}",
                )
            ],
        ),
        Panel(
            "KV transfers that failed",
            "failed: a pull broke off. expired: prefill freed KV before decode had pulled it; "
            "raise kv_transfer.lease_s or find what delays decode.",
            "short",
            [
                (rate("ray_vllm_nixl_num_failed_transfers_total", M, "ReplicaId"), "failed"),
                (rate("ray_vllm_nixl_num_kv_expired_reqs_total", M, "ReplicaId"), "expired"),
            ],
        ),
    ],
}

STEPS = "ray_vllm_eldr_decode_steps_total"
DISTINCT = "ray_vllm_eldr_distinct_experts_total"
LOCALITY: dict[str, list[Panel]] = {
    "Experts": [
        Panel(
            "Distinct experts a step",
            "Mean over decode steps and MoE layers, all replicas: what locality routing is for. "
            "Compare at equal batch with policy jsq before you change the policy.",
            "short",
            [(ratio(rate(DISTINCT, M), rate(STEPS, M)), "mean")],
        ),
        Panel(
            "Distinct experts, by replica",
            "A replica far above the others at equal load has lost its specialty: see Refits.",
            "short",
            [
                (
                    ratio(rate(DISTINCT, M, "ReplicaId"), rate(STEPS, M, "ReplicaId")),
                    "{{ReplicaId}}",
                )
            ],
        ),
        Panel(
            "Distinct experts, distribution",
            "Over decode steps. P99 near the number of experts: full batches of mixed traffic.",
            "short",
            quantiles("ray_vllm_eldr_step_distinct_experts_bucket", M),
        ),
        Panel(
            "Batch, by replica",
            "Requests that each decode replica holds, to read the experts against.",
            "short",
            in_flight("decode"),
        ),
    ],
    "Likeness": [
        Panel(
            "Similarity, best and chosen",
            "Mean cosine to the most alike replica, and to the chosen one. Best falls: the traffic "
            "has changed; refit (router.refit.when: online) or calibrate anew.",
            "short",
            [
                (
                    ratio(
                        rate("ray_eldr_router_best_similarity_sum_total", A),
                        rate("ray_eldr_router_scored_total", A),
                    ),
                    "best",
                ),
                (
                    ratio(
                        rate("ray_eldr_router_similarity_sum_total", A),
                        rate("ray_eldr_router_placed_alike_total", A),
                    ),
                    "chosen",
                ),
            ],
        ),
        Panel(
            "Band",
            "Mean number of replicas in the locality band; policy band alone has one. Near the "
            "number of replicas: router.tau is too wide; 1 with high skew: too narrow.",
            "short",
            [
                (
                    ratio(
                        rate("ray_eldr_router_band_size_sum_total", A),
                        rate("ray_eldr_router_banded_total", A),
                    ),
                    "replicas",
                )
            ],
        ),
        Panel(
            "Decisions by policy",
            "Chosen a second. Two policies at once: an ingress runs with older settings.",
            "reqps",
            [(rate("ray_eldr_router_selections_total", A, "policy"), "{{policy}}")],
        ),
        Panel(
            "Skew",
            "Fullest decode replica over the mean: the price of likeness.",
            "short",
            OVERVIEW["Load"][2].queries,
            red=2,
        ),
    ],
    "Centroids": [
        Panel(
            "Refits",
            "Refits in the last hour, by outcome. failed: the router's log says why; the old "
            "centroids stay. overtaken: the pool changes faster than router.refit.settle_s.",
            "short",
            [
                (
                    f"sum by (outcome) (increase(ray_eldr_router_refits_total{{{A}}}[1h]))",
                    "{{outcome}}",
                )
            ],
        ),
        Panel(
            "Moved share",
            "Share of recent requests whose nearest replica the last refit changed. High after "
            "each refit: the traffic is not stable; lengthen router.refit.window_s.",
            "percentunit",
            [(f"max by (application) (ray_eldr_router_moved_share{{{A}}})", "moved")],
            red=0.6,
        ),
    ],
}

HITS, DEMAND = "ray_vllm_eldr_cache_hits_total", "ray_vllm_eldr_cache_demand_loads_total"
CACHE: dict[str, list[Panel]] = {
    "Expert cache": [
        Panel(
            "Hits",
            "Share of a step's experts that were in a slot. Low: more slots (cache.fraction), or "
            "traffic that the replica does not specialise in; see Overlap.",
            "percentunit",
            [
                (
                    ratio(
                        rate(HITS, M, "ReplicaId"),
                        f"({rate(HITS, M, 'ReplicaId')} + {rate(DEMAND, M, 'ReplicaId')})",
                    ),
                    "{{ReplicaId}}",
                )
            ],
            red=0.5,
            red_below=True,
        ),
        Panel(
            "Loads",
            "Experts loaded a second. demand: a step waited. proactive: ahead of use. streamed: "
            "read by a long prompt without a slot. Proactive without fewer demand loads: lower "
            "cache.budget.",
            "short",
            [
                (rate(DEMAND, M), "demand"),
                (rate("ray_vllm_eldr_cache_proactive_loads_total", M), "proactive"),
                (rate("ray_vllm_eldr_cache_streamed_loads_total", M), "streamed"),
            ],
        ),
        Panel(
            "Bytes loaded",
            "Bytes a second of all loads. Near the link's bandwidth: steps wait for loads; more "
            "slots or fewer proactive loads.",
            "Bps",
            [(rate("ray_vllm_eldr_cache_load_bytes_total", M, "ReplicaId"), "{{ReplicaId}}")],
        ),
        Panel(
            "Passes a layer",
            "Kernel calls of an MoE layer and step. Above 1: a step needs more experts than there "
            "are slots; smaller batches or more slots.",
            "short",
            [
                (
                    ratio(
                        rate("ray_vllm_eldr_cache_kernel_calls_total", M, "ReplicaId"),
                        rate("ray_vllm_eldr_cache_layer_steps_total", M, "ReplicaId"),
                    ),
                    "{{ReplicaId}}",
                )
            ],
            red=1.5,
        ),
        Panel(
            "Evictions",
            "Experts that lost their slot, a second. About as many as loads once slots are full.",
            "short",
            [(rate("ray_vllm_eldr_cache_evictions_total", M, "ReplicaId"), "{{ReplicaId}}")],
        ),
        Panel(
            "Slots B and budget R",
            "Experts of a layer that fit, and that may be loaded ahead. B that falls by itself: "
            "the node is short of memory (cache.adaptive).",
            "short",
            [
                (f"max by (replica) (ray_eldr_cache_slots{{{A}}})", "B {{replica}}"),
                (f"max by (replica) (ray_eldr_cache_budget{{{A}}})", "R {{replica}}"),
            ],
        ),
        Panel(
            "Overlap",
            "Share of the uses expected of a replica's cluster that fall on experts it holds. Low "
            "with high hits: the traffic is not what the artifact expects; calibrate anew.",
            "percentunit",
            [(f"max by (replica) (ray_eldr_cache_home_overlap{{{A}}})", "{{replica}}")],
        ),
    ],
    "Expert placement": [
        Panel(
            "Rank balance",
            "Active experts on the fullest EP rank over the mean; 1 is even. measured far above "
            "expected: the plan is for other traffic; the next one follows by itself.",
            "short",
            [
                (
                    f"max by (replica, kind) (ray_eldr_placement_rank_balance{{{A}}})",
                    "{{kind}} {{replica}}",
                )
            ],
            red=1.5,
        ),
        Panel(
            "Plan version",
            "A version that does not change for days with poor balance: moves never pay; lower "
            "placement.move_price.",
            "short",
            [(f"max by (replica) (ray_eldr_placement_version{{{A}}})", "{{replica}}")],
        ),
        Panel(
            "Moves",
            "Experts moved to another rank in the last hour. Many each hour: raise "
            "placement.hysteresis.",
            "short",
            [
                (
                    f"sum by (replica) (increase(ray_eldr_placement_moves_total{{{A}}}[1h]))",
                    "{{replica}}",
                )
            ],
        ),
    ],
}

BOARDS = {
    "eldr-overview": ("Eldr overview", OVERVIEW),
    "eldr-locality": ("Eldr locality", LOCALITY),
    "eldr-cache": ("Eldr expert cache and placement", CACHE),
}


def board(uid: str, title: str, rows: dict[str, list[Panel]]) -> dict[str, Any]:
    """A dashboard as Grafana imports it."""
    panels: list[dict[str, Any]] = []
    y = 0
    for name, row in rows.items():
        panels.append(
            {
                "id": len(panels) + 1,
                "type": "row",
                "title": name,
                "collapsed": False,
                "gridPos": {"x": 0, "y": y, "w": 24, "h": 1},
                "panels": [],
            }
        )
        for i, panel in enumerate(row):
            place = {"x": i % 3 * 8, "y": y + 1 + i // 3 * 8, "w": 8, "h": 8}
            panels.append({"id": len(panels) + 1, "gridPos": place, **_panel(panel)})
        y += 1 + (len(row) + 2) // 3 * 8
    return {
        "uid": uid,
        "title": title,
        "tags": ["eldr"],
        "schemaVersion": 39,
        "timezone": "",
        "editable": True,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {
            "list": [
                {
                    "name": "datasource",
                    "label": "Data source",
                    "type": "datasource",
                    "query": "prometheus",
                },
                _variable("application", "Application", "ray_eldr_active_requests"),
                _variable("model", "Model", "ray_vllm_generation_tokens_total", "model_name"),
            ]
        },
        "links": [
            {
                "type": "dashboards",
                "title": "Eldr",
                "tags": ["eldr"],
                "asDropdown": True,
                "includeVars": True,
                "keepTime": True,
            }
        ],
        "panels": panels,
    }


def _panel(panel: Panel) -> dict[str, Any]:
    colours = ("red", "green") if panel.red_below else ("green", "red")
    steps: list[dict[str, Any]] = [{"color": colours[0] if panel.red else "green", "value": None}]
    if panel.red is not None:
        steps.append({"color": colours[1], "value": panel.red})
    return {
        "type": "timeseries",
        "title": panel.title,
        "description": panel.text,
        "datasource": DATASOURCE,
        "fieldConfig": {
            "defaults": {
                "unit": panel.unit,
                "min": 0,
                "custom": {
                    "showPoints": "never",
                    "thresholdsStyle": {"mode": "dashed" if panel.red is not None else "off"},
                },
                "thresholds": {"mode": "absolute", "steps": steps},
            },
            "overrides": [],
        },
        "options": {"tooltip": {"mode": "multi"}, "legend": {"displayMode": "list"}},
        "targets": [
            {
                "refId": chr(ord("A") + i),
                "datasource": DATASOURCE,
                "expr": expr,
                "legendFormat": legend,
            }
            for i, (expr, legend) in enumerate(panel.queries)
        ],
    }


def _variable(name: str, label: str, metric: str, of: str = "application") -> dict[str, Any]:
    return {
        "name": name,
        "label": label,
        "type": "query",
        "datasource": DATASOURCE,
        "query": {"query": f"label_values({metric}, {of})", "refId": "variable"},
        "definition": f"label_values({metric}, {of})",
        "includeAll": True,
        "allValue": ".*",
        "multi": True,
        "current": {"text": "All", "value": "$__all"},
        "refresh": 2,
        "sort": 1,
    }


def files() -> dict[str, str]:
    """File name and text of every dashboard."""
    return {
        f"{uid}.json": json.dumps(board(uid, title, rows), indent=1, ensure_ascii=False) + "\n"
        for uid, (title, rows) in BOARDS.items()
    }


if __name__ == "__main__":
    for name, text in files().items():
        (FOLDER / name).write_text(text, encoding="utf-8")
