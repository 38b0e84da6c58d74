"""The bundled demo model: a small, trained Qwen3-MoE with locality in its routing.

Requests of one domain or language share experts, and decode follows prefill. The model stands in
for a large MoE on a laptop or in CI: engine, router and caches run as they would in production, on
real expert choices. `train` makes it, `pack` stores it compactly in `models/demo`, `unpack`
restores an ordinary Hugging Face folder, `report` measures its structure.
"""

from calibration.demo_model.cli import add_cli
from calibration.demo_model.packing import PackedModelError, pack, unpack
from calibration.demo_model.reporting import failed_requirements, format_report, report
from calibration.demo_model.training import train

__all__ = [
    "PackedModelError",
    "add_cli",
    "failed_requirements",
    "format_report",
    "pack",
    "report",
    "train",
    "unpack",
]
