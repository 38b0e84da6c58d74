"""Compact storage of the demo model: 8-bit projections in one safetensors file, and back.

Every projection matrix (attention and experts) is stored as int8 with one float32 scale per output
row, symmetric around zero: weight = int8 * scale, scale = max |row| / 127. The rounding error of a
weight is at most half a scale. Embeddings, norms and router gates keep their 16 bits: they are
small, and a gate's rounding would move tokens to other experts.

A packed folder holds a `manifest.json` with size and SHA-256 of each file; nothing is unpacked
unless all of them match.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

DEFAULT_PACKED_DIR = Path("models/demo")
DEFAULT_MODEL_DIR = Path("build/demo-model")

FORMAT = "int8-rows-1"
MANIFEST_FILE = "manifest.json"
PACKED_WEIGHTS_FILE = "weights.int8.safetensors"
WEIGHTS_FILE = "model.safetensors"
STAMP_FILE = ".unpacked.json"

_QUANTISED_SUFFIX = "_proj.weight"
_SCALE_SUFFIX = ".row_scale"
_REQUIRED_FILES = ("config.json", "tokenizer.json", "tokenizer_config.json")
_COPIED_PATTERNS = ("*.json", "*.jinja")


class PackedModelError(ValueError):
    """A packed model folder is missing, incomplete or not what its manifest says."""


def pack(hf_dir: Path | str, packed_dir: Path | str = DEFAULT_PACKED_DIR) -> dict[str, Any]:
    """Store a Hugging Face folder compactly.

    Args:
        hf_dir: folder with `*.safetensors`, `config.json` and tokenizer files.
        packed_dir: folder to write; other files in it (a README) stay.

    Returns:
        The manifest: format, and size in bytes and SHA-256 of each file.

    Raises:
        ValueError: hf_dir lacks a file that a model folder needs.
    """
    from safetensors.torch import save_file

    source, target = Path(hf_dir), Path(packed_dir)
    missing = [name for name in _REQUIRED_FILES if not (source / name).is_file()]
    if missing:
        raise ValueError(
            f"{str(source)!r} is not a model folder, it lacks {', '.join(missing)}: pass the "
            "folder that `eldr demo-model train` wrote"
        )
    target.mkdir(parents=True, exist_ok=True)
    packed: dict[str, torch.Tensor] = {}
    for name, weight in _load_weights(source).items():
        if name.endswith(_QUANTISED_SUFFIX):
            packed[name], packed[name + _SCALE_SUFFIX] = quantise_rows(weight)
        else:
            packed[name] = weight.contiguous()
    save_file(packed, target / PACKED_WEIGHTS_FILE, metadata={"format": FORMAT})
    make_readable(target)

    names = {PACKED_WEIGHTS_FILE}
    for pattern in _COPIED_PATTERNS:
        for path in source.glob(pattern):
            if path.name not in (MANIFEST_FILE, STAMP_FILE) and not path.name.endswith(
                ".index.json"
            ):
                shutil.copyfile(path, target / path.name)
                names.add(path.name)
    manifest = {
        "format": FORMAT,
        "files": {name: _describe(target / name) for name in sorted(names)},
    }
    (target / MANIFEST_FILE).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
    return manifest


def unpack(
    packed_dir: Path | str = DEFAULT_PACKED_DIR, out_dir: Path | str = DEFAULT_MODEL_DIR
) -> bool:
    """Restore an ordinary bfloat16 Hugging Face folder from a packed one.

    The folder is written beside its place and renamed into it, so a reader never sees half a
    model, and several processes may unpack at once. A stamp in it names the packed files it came
    from; when they are unchanged, nothing is written.

    Args:
        packed_dir: folder that `pack` wrote.
        out_dir: folder to write. An older unpacked model there is replaced; any other folder
            that is not empty is refused.

    Returns:
        True if the folder was written, False if it was up to date.

    Raises:
        PackedModelError: the packed folder is incomplete or a file does not match its manifest.
        ValueError: out_dir holds something that `unpack` did not write.
    """
    packed, out = Path(packed_dir), Path(out_dir)
    manifest = verify_packed(packed)
    if _is_up_to_date(out, manifest):
        return False
    if out.exists() and not (out / STAMP_FILE).is_file() and _is_occupied(out):
        raise ValueError(
            f"{str(out)!r} exists and was not written by unpack, so it is left alone: remove it, "
            "or choose another folder with --out"
        )
    out.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
    try:
        # mkdtemp makes a private folder; a model folder is as readable as any other.
        staging.chmod(0o755)
        _write_unpacked(packed, manifest, staging)
        _replace_folder(staging, out, manifest)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return True


def verify_packed(packed_dir: Path | str) -> dict[str, Any]:
    """Check every file of a packed folder against its manifest, and return the manifest.

    Raises:
        PackedModelError: no readable manifest, an unknown format, or a file that is missing or
            differs; the message names file, expected and found value.
    """
    packed = Path(packed_dir)
    manifest = _read_manifest(packed)
    for name, expected in manifest["files"].items():
        path = packed / name
        if not path.is_file():
            raise PackedModelError(
                f"packed model file {str(path)!r} is missing, though {MANIFEST_FILE} lists it: "
                "restore the folder from the repository or pack the model again"
            )
        found = _describe(path)
        for key, unit in (("bytes", "bytes"), ("sha256", "SHA-256")):
            if found[key] != expected[key]:
                raise PackedModelError(
                    f"packed model file {str(path)!r} is corrupted: {unit} {found[key]}, but "
                    f"{MANIFEST_FILE} says {expected[key]}: restore the file from the repository "
                    "or pack the model again"
                )
    return manifest


def make_readable(folder: Path) -> None:
    """Let everyone read the weights: safetensors writes them for their owner alone."""
    for path in folder.glob("*.safetensors"):
        path.chmod(0o644)


def quantise_rows(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Symmetric int8 quantisation with one scale per output row.

    Args:
        weight: shape (..., rows, columns), any float type.

    Returns:
        Integers in [-127, 127], int8, shape of weight; scales, float32, shape (..., rows). A row of
        zeros has scale 0.
    """
    import torch

    exact = weight.float()
    scales = exact.abs().amax(dim=-1) / 127
    divisor = torch.where(scales > 0, scales, torch.ones_like(scales))
    rounded = (exact / divisor.unsqueeze(-1)).round().clamp(-127, 127)
    return rounded.to(torch.int8).contiguous(), scales.contiguous()


def dequantise_rows(integers: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Inverse of `quantise_rows`, in bfloat16, shape of integers."""
    import torch

    return (integers.float() * scales.unsqueeze(-1)).to(torch.bfloat16).contiguous()


def _read_manifest(packed: Path) -> dict[str, Any]:
    path = packed / MANIFEST_FILE
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as err:
        raise PackedModelError(
            f"{str(packed)!r} is not a packed model, it has no {MANIFEST_FILE}: pass a folder that "
            f"`eldr demo-model pack` wrote (in this repository: {DEFAULT_PACKED_DIR})"
        ) from err
    except (json.JSONDecodeError, UnicodeDecodeError) as err:
        raise PackedModelError(
            f"{str(path)!r} is not JSON ({err}): restore it from the repository or pack again"
        ) from err
    found = manifest.get("format") if isinstance(manifest, dict) else None
    if found != FORMAT:
        raise PackedModelError(
            f"{str(path)!r} has format {found!r}, this release reads {FORMAT!r}: pack the model "
            "again with `eldr demo-model pack`"
        )
    names = manifest.get("files")
    if not isinstance(names, dict) or PACKED_WEIGHTS_FILE not in names:
        raise PackedModelError(
            f"{str(path)!r} lists no {PACKED_WEIGHTS_FILE}: pack the model again"
        )
    for name in names:
        if Path(name).name != name:
            raise PackedModelError(
                f"{str(path)!r} lists {name!r}: only plain file names of its own folder are allowed"
            )
    return dict(manifest)


def _describe(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        return {
            "bytes": path.stat().st_size,
            "sha256": hashlib.file_digest(file, "sha256").hexdigest(),
        }


def _load_weights(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    paths = sorted(folder.glob("*.safetensors"))
    if not paths:
        raise ValueError(
            f"{str(folder)!r} has no *.safetensors file: pass a Hugging Face model folder"
        )
    weights: dict[str, torch.Tensor] = {}
    for path in paths:
        weights |= load_file(path)
    return weights


def _stamp(manifest: dict[str, Any]) -> dict[str, str]:
    """What identifies the packed files: name to SHA-256."""
    return {name: entry["sha256"] for name, entry in manifest["files"].items()}


def _is_up_to_date(out: Path, manifest: dict[str, Any]) -> bool:
    try:
        stamp = json.loads((out / STAMP_FILE).read_text(encoding="utf-8"))
        # Sizes show a file that was removed or cut after unpacking, without reading 50 MB.
        intact = all((out / name).stat().st_size == size for name, size in stamp["sizes"].items())
        return intact and stamp["packed_sha256"] == _stamp(manifest)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _is_occupied(out: Path) -> bool:
    return not out.is_dir() or any(out.iterdir())


def _write_unpacked(packed: Path, manifest: dict[str, Any], target: Path) -> None:
    from safetensors.torch import load_file, save_file

    stored = load_file(packed / PACKED_WEIGHTS_FILE)
    weights = {}
    for name, tensor in stored.items():
        if name.endswith(_SCALE_SUFFIX):
            continue
        scales = stored.get(name + _SCALE_SUFFIX)
        weights[name] = tensor if scales is None else dequantise_rows(tensor, scales)
    save_file(weights, target / WEIGHTS_FILE, metadata={"format": "pt"})
    make_readable(target)
    for name in manifest["files"]:
        if name != PACKED_WEIGHTS_FILE:
            shutil.copyfile(packed / name, target / name)
    sizes = {path.name: path.stat().st_size for path in target.iterdir()}
    stamp = {"packed_sha256": _stamp(manifest), "sizes": sizes}
    (target / STAMP_FILE).write_text(json.dumps(stamp, indent=1) + "\n", encoding="utf-8")


def _replace_folder(staging: Path, out: Path, manifest: dict[str, Any]) -> None:
    """Rename staging to out; what is there before goes only once the new folder is complete."""
    retired = staging.with_name(staging.name + "-old")
    try:
        if out.exists():
            os.rename(out, retired)
        os.rename(staging, out)
    except OSError:
        # Another process may have put the same model there in between.
        if not _is_up_to_date(out, manifest):
            if retired.exists() and not out.exists():
                os.rename(retired, out)
            raise
    finally:
        if out.exists():
            shutil.rmtree(retired, ignore_errors=True)
