"""What a worker's expert cache is told at its start. Plain data, for vLLM's configuration."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Self

SETTINGS_KEY = "eldr_cache"  # in vLLM's `additional_config`


@dataclass(frozen=True, slots=True)
class CacheSettings:
    """Settings of one decode engine's expert cache.

    Attributes:
        policy: one of `CACHE_POLICIES`.
        slots: B, experts of a layer that stay on the device; None takes `fraction`.
        fraction: B as a share of the layer's experts.
        lrfu_lambda: of policy lrfu.
        budget: R, candidates checked before each access; policy spatio only.
        store_dir: folder of the backing store.
        score_file: weights or hotness that the policy scores by, for policy learned the folder of
            the score; None takes the model's own gates.
        placement: placement plan that says which rank computes an expert, under expert
            parallelism; None: the rank that loads it.
        exact_tokens: steps up to this size are split by tokens when their experts do not fit.
    """

    policy: str
    slots: int | None
    fraction: float
    lrfu_lambda: float
    budget: int
    store_dir: str
    score_file: str | None
    placement: str | None
    exact_tokens: int

    def as_dict(self) -> dict[str, Any]:
        """Plain form, for vLLM's `additional_config`."""
        return asdict(self)

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> Self:
        """From the plain form."""
        return cls(**data)

    def capacity(self, num_experts: int) -> int:
        """B of a layer with that many experts, before it is checked."""
        return self.slots if self.slots is not None else math.ceil(self.fraction * num_experts)
