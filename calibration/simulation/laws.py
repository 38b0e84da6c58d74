"""Step-time laws of known deployments, in seconds, and how each was arrived at.

`qwen3-30b-a3b-mi300x` is from published points only (ELDR, arXiv 2607.00466):

* One MoE layer takes 4.7 times as long with 128 distinct experts as with 16, and as long with a
  batch of 128 as with one of 32. So the layer's time is proportional to distinct + 14.3, and a
  request adds nothing to it.
* A request does add the reading of its KV in attention: 96 KiB a token, some 400 tokens in the
  mean, at 3.2 TB/s 12.5 us (arithmetic).
* The scale is not published as a number. The round-robin column of the authors' TPOT table (Qwen,
  task, 8P16D) gives it: Little's law says how many requests a replica holds at each rate (rate /
  16 x 511 tokens x TPOT), our synthetic workload how many distinct experts such a mixed batch
  activates, and least squares gives TPOT - 12.5 us x batch = 5.8 ms + 0.170 ms x distinct (R
  squared 0.89; the column is not monotone, which no such law can follow). Of the 5.8 ms, 48 layers
  x 14.3 experts account for 2.4, all else for 3.4. A layer with 100 experts then takes 0.40 ms;
  read off the published figure by eye it is 0.35 to 0.45.

Hence the round-robin TPOT of a simulation is fitted to the paper's, and only what other policies
change is predicted. All that grows with the rate, other than KV, is put down to experts: an upper
estimate of what fewer experts save.

The rooflines are arithmetic, not measurements: bytes of an expert in all layers over 60 % of the
5.3 TB/s of an MI300X, and an assumed time for the rest.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from calibration.step_time import StepTimeLaw

if TYPE_CHECKING:
    from calibration.simulation.config import StepTimeSection

SATURATION_EXPERTS = 14.27
"""Distinct experts whose time equals the fixed time of a layer: (128 - 4.7 * 16) / 3.7."""

KV_READ_S = 12.5e-6
"""Seconds to read one request's KV in a step of Qwen3-30B-A3B: 400 tokens of 96 KiB."""

_BANDWIDTH = 0.6 * 5.3e12  # bytes per second


@dataclass(frozen=True, slots=True)
class NamedLaw:
    """A law and where it comes from."""

    law: StepTimeLaw
    origin: str


def _roofline(base_s: float, num_layers: int, expert_bytes: float) -> StepTimeLaw:
    return StepTimeLaw(base_s, 0.0, num_layers * expert_bytes / _BANDWIDTH)


LAWS = {
    "qwen3-30b-a3b-mi300x": NamedLaw(
        StepTimeLaw(5.8e-3, KV_READ_S, 0.170e-3),
        "published points: 4.7x from 16 to 128 experts, flat in batch; KV reads by arithmetic; "
        "scale from the paper's round-robin TPOT",
    ),
    "gpt-oss-20b-roofline": NamedLaw(
        _roofline(1.5e-3, 24, 3 * 2880 * 2880 * 4.25 / 8),
        "arithmetic: mxfp4 experts over 3.2 TB/s, 1.5 ms assumed for the rest",
    ),
    "deepseek-v2-lite-roofline": NamedLaw(
        _roofline(2.0e-3, 26, 3 * 2048 * 1408 * 2),
        "arithmetic: bf16 experts over 3.2 TB/s, 2 ms assumed for the rest",
    ),
}


def make_law(section: StepTimeSection) -> NamedLaw:
    """The law that a configuration asks for, in seconds.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is no report of `eldr bench step-time --json`.
    """
    if section.law == "linear":
        law = StepTimeLaw(
            section.base_ms / 1e3,
            section.per_request_ms / 1e3,
            section.per_distinct_ms / 1e3,
            section.per_load_ms / 1e3,
        )
        return NamedLaw(law, "coefficients of the configuration")
    if section.law == "file":
        assert section.file is not None
        return NamedLaw(_read_law(Path(section.file)), "measured on an engine")
    known = LAWS[section.law]
    return NamedLaw(replace(known.law, per_load=section.per_load_ms / 1e3), known.origin)


def _read_law(path: Path) -> StepTimeLaw:
    if not path.is_file():
        raise FileNotFoundError(f"no report at {path}: run `eldr bench step-time --json > {path}`")
    try:
        report: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        law_s = report["law_s"]
        return StepTimeLaw(**{name: float(law_s[name]) for name in StepTimeLaw.__slots__})
    except (ValueError, KeyError, TypeError) as err:
        raise ValueError(
            f"{path} is no report of `eldr bench step-time --json`: needs `law_s` with "
            f"{', '.join(StepTimeLaw.__slots__)} ({err!r})"
        ) from err
