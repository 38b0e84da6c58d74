"""What the configuration check reads from a model folder, a calibration artifact, a placement plan.

All are read with the standard library alone, so that `eldr config check` works on a machine
without vLLM, transformers or NumPy.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Families name the same thing differently; the first key that is present counts.
MAX_SIGNATURES = 1024  # of calibration.artifact, which needs NumPy
NUM_EXPERTS_KEYS = ("num_experts", "num_local_experts", "n_routed_experts")
TOP_K_KEYS = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k")
SPARSE_STEP_KEYS = ("decoder_sparse_step", "interleave_moe_layer_step")

# Keys whose change makes captured expert counts meaningless for the model. Left out on purpose:
# dtype, library versions, token ids, context length and generation defaults.
FINGERPRINT_KEYS = (
    "architectures",
    "model_type",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
    "n_shared_experts",
    "first_k_dense_replace",
    "mlp_only_layers",
    "moe_layer_freq",
    "norm_topk_prob",
    "n_group",
    "topk_group",
    "scoring_func",
    "routed_scaling_factor",
    "quantization_config",
    *NUM_EXPERTS_KEYS,
    *TOP_K_KEYS,
    *SPARSE_STEP_KEYS,
)

# RoPE types whose `max_position_embeddings` is the scaled length already; for the others the
# factor comes on top (the rule of vLLM's `_get_and_verify_max_len`).
PRESCALED_ROPE_TYPES = frozenset(
    {"su", "longrope", "llama3", "yarn", "deepseek_yarn", "deepseek_llama_scaling"}
)


class FactsError(ValueError):
    """A folder lacks the file or the field that was to be read; the text says which."""


@dataclass(frozen=True)
class ModelFacts:
    """Shape of a model as routing sees it.

    Attributes:
        num_moe_layers: L, layers with routed experts; 0 for a dense model.
        num_experts: E, routed experts of a layer; 0 for a dense model.
        top_k: experts a token chooses in a layer; 0 for a dense model.
        max_position_embeddings: longest context in tokens, RoPE scaling included; None if unknown.
        model_type: family name in `config.json`; None if it gives none.
        fingerprint: 16 hex digits over architecture and weight files; see `model_facts`.
    """

    num_moe_layers: int
    num_experts: int
    top_k: int
    max_position_embeddings: int | None
    model_type: str | None
    fingerprint: str

    @property
    def is_moe(self) -> bool:
        return self.num_moe_layers > 0


@dataclass(frozen=True)
class ArtifactFacts:
    """What a calibration artifact says about the model it was fitted for.

    Attributes:
        model_id: path or hub id given at calibration; for messages only.
        fingerprint: `ModelFacts.fingerprint` of that model.
        num_layers: L, MoE layers in a signature before the layer mask.
        num_experts: E.
        top_k: experts a token chooses in a layer.
        k: K, number of centroids.
        num_signatures: calibration signatures kept in it.
    """

    model_id: str
    fingerprint: str
    num_layers: int
    num_experts: int
    top_k: int
    k: int
    num_signatures: int


@dataclass(frozen=True)
class ScoreFacts:
    """What a learned retention score says about the model it was trained for.

    Attributes:
        model_id: folder or name given at training; for messages only.
        fingerprint: `ModelFacts.fingerprint` of that model; None: it was not known.
        num_layers: L, MoE layers.
        num_experts: E.
    """

    model_id: str
    fingerprint: str | None
    num_layers: int
    num_experts: int


@dataclass(frozen=True)
class PlanFacts:
    """What a placement plan says about the engine it was made for.

    Attributes:
        fingerprint: `ModelFacts.fingerprint` of its model.
        num_layers: L, MoE layers.
        num_slots: P, slots of all ranks in a layer.
        num_ranks: R.
    """

    fingerprint: str
    num_layers: int
    num_slots: int
    num_ranks: int


def model_facts(path: str | Path) -> ModelFacts:
    """Read a local model folder.

    The fingerprint is SHA-256 over the canonical JSON of the architecture keys of `config.json`
    and of the names and sizes of the `*.safetensors` files, cut to 16 hex digits. Weights are not
    hashed: that would read many gigabytes at each start. Two trainings of one architecture thus
    differ only if a file size differs.

    Raises:
        FactsError: there is no `config.json`, it is not a JSON object, or a count in it is not a
            positive integer.
    """
    folder = Path(path)
    raw = _read_json(folder / "config.json", "a model folder needs it")
    text = raw.get("text_config")
    # Multimodal models keep the language model's keys one level down.
    config = {**raw, **text} if isinstance(text, dict) else raw
    num_experts = _count(config, NUM_EXPERTS_KEYS)
    # A single "expert" is a dense layer under another name.
    moe_layers = _num_moe_layers(config) if num_experts > 1 else 0
    return ModelFacts(
        num_moe_layers=moe_layers,
        num_experts=num_experts if moe_layers else 0,
        top_k=_count(config, TOP_K_KEYS) if moe_layers else 0,
        max_position_embeddings=_context_length(config),
        model_type=raw.get("model_type"),
        fingerprint=_fingerprint(folder, config),
    )


def artifact_facts(path: str | Path) -> ArtifactFacts:
    """Read `calibration.json` of a calibration artifact; the arrays are not opened.

    Raises:
        FactsError: the file or a field is missing or has another type.
    """
    file = Path(path) / "calibration.json"
    raw = _read_json(file, "create the artifact with `eldr calibrate fit`")
    types = {
        "format_version": int,
        "model_id": str,
        "fingerprint": str,
        "num_layers": int,
        "num_experts": int,
        "top_k": int,
        "k": int,
        "num_requests": int,
    }
    for name, kind in types.items():
        if type(raw.get(name)) is not kind:
            raise FactsError(
                f"{file}: field {name!r} must be of type {kind.__name__}, got {raw.get(name)!r}: "
                "refit with `eldr calibrate fit`"
            )
    del types["format_version"], types["num_requests"]
    num_signatures = min(raw["num_requests"], MAX_SIGNATURES)
    return ArtifactFacts(**{name: raw[name] for name in types}, num_signatures=num_signatures)


def score_facts(path: str | Path) -> ScoreFacts:
    """Read `score.json` of a learned retention score; the arrays are not opened.

    Raises:
        FactsError: the file or a field is missing or has another type.
    """
    file = Path(path) / "score.json"
    raw = _read_json(file, "give the folder that `eldr cache train` wrote")
    fields = {name: raw.get(name) for name in ScoreFacts.__annotations__}
    types = {"model_id": str, "fingerprint": str | None, "num_layers": int, "num_experts": int}
    for name, kind in types.items():
        if not isinstance(fields[name], kind) or isinstance(fields[name], bool):
            raise FactsError(
                f"{file}: field {name!r} has the wrong type, got {fields[name]!r}: train again "
                "with `eldr cache train`"
            )
    return ScoreFacts(**fields)  # type: ignore[arg-type]


def plan_facts(file: Path) -> PlanFacts:
    """Read a file of `cachemgr.placement_plan`; checksum and experts are left to who uses them.

    Raises:
        FactsError: the file or a field is missing or has another type.
    """
    help_text = "make one with `eldr cache place`"
    raw = _read_json(file, help_text)
    fingerprint, num_ranks = raw.get("fingerprint"), raw.get("num_ranks")
    table = raw.get("physical_to_logical")
    if not (
        type(fingerprint) is str
        and type(num_ranks) is int
        and isinstance(table, list)
        and table
        and all(isinstance(row, list) and len(row) == len(table[0]) for row in table)
    ):
        raise FactsError(f"{file} is no placement plan: {help_text}")
    return PlanFacts(fingerprint, len(table), len(table[0]), num_ranks)


def _read_json(file: Path, help_text: str) -> dict[str, Any]:
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except OSError as err:
        raise FactsError(f"cannot read {file} ({err.strerror}): {help_text}") from err
    except ValueError as err:
        raise FactsError(f"{file} is not valid JSON ({err}): {help_text}") from err
    if not isinstance(value, dict):
        raise FactsError(f"{file} must hold a JSON object, got {type(value).__name__}")
    return value


def _count(config: Mapping[str, Any], keys: tuple[str, ...]) -> int:
    """Value of the first of `keys` that is present; 0 if there is none."""
    for key in keys:
        value = config.get(key)
        if value is None:
            continue
        if type(value) is not int or value < 0:
            raise FactsError(f"config.json: {key} must be an integer >= 0, got {value!r}")
        return value
    return 0


def _num_moe_layers(config: Mapping[str, Any]) -> int:
    """Layers with routed experts; the dense ones are listed in a way of each family."""
    dense = set(config.get("mlp_only_layers") or ())
    first_sparse = _count(config, ("first_k_dense_replace",))
    step = _count(config, SPARSE_STEP_KEYS) or 1
    # An integer period counted from layer 0 (DeepSeek), or one 0/1 flag a layer.
    frequency = config.get("moe_layer_freq") or 1

    def is_sparse(layer: int) -> bool:
        if isinstance(frequency, list):
            in_period = layer < len(frequency) and bool(frequency[layer])
        else:
            in_period = layer % int(frequency) == 0
        return (
            layer >= first_sparse and layer not in dense and (layer + 1) % step == 0 and in_period
        )

    return sum(is_sparse(layer) for layer in range(_count(config, ("num_hidden_layers",))))


def _context_length(config: Mapping[str, Any]) -> int | None:
    length = _count(config, ("max_position_embeddings",))
    if not length:
        return None
    # `rope_scaling` up to transformers 4, `rope_parameters` since 5.
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    rope_type = rope.get("rope_type") or rope.get("type")
    factor = rope.get("factor")
    if rope_type in PRESCALED_ROPE_TYPES or not isinstance(factor, int | float):
        return length
    return int(length * factor)


def _fingerprint(folder: Path, config: Mapping[str, Any]) -> str:
    facts = {
        "config": {key: config[key] for key in FINGERPRINT_KEYS if config.get(key) is not None},
        "weights": {file.name: file.stat().st_size for file in folder.glob("*.safetensors")},
    }
    canonical = json.dumps(facts, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()[:16]
