"""Report on a demo model: loss by group, and the routing structure that the router relies on.

All numbers are of test rows, which the model has not seen. A row's chat-formatted prompt stands
for prefill; its reference answer, teacher-forced, stands for decode.

Array legend: L MoE layers, E experts, K experts a token (top-k), T tokens.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from calibration.demo_model import chat
from calibration.demo_model.corpus import (
    LANGUAGE_GROUPS,
    TASK_GROUPS,
    PromptRow,
    load_rows,
    rows_by_group,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from calibration.demo_model.locality import ChoicesLTK

BATCH_SIZES = (8, 16, 32)
REQUIRED_CORRELATION = 0.70
REQUIRED_CHANGE_PERCENT = -12.0

_MAX_PROMPT_TOKENS = 768
_MAX_ANSWER_TOKENS = 128
_BATCH_REPEATS = 1000
_MIN_DECODE_TOKENS = 8
"""Below this, the expert use of one answer is too coarse a sample to correlate with."""


_CORRELATIONS = {
    "pooled_by_group": ("groups, requests pooled", True),
    "mean_per_request": (f"requests of >= {_MIN_DECODE_TOKENS} answer tokens, mean", True),
    "mean_over_all_requests": ("all requests, mean", False),
}
"""Key in the report to label and whether `REQUIRED_CORRELATION` applies."""


@dataclass(frozen=True)
class MeasuredRow:
    """What one test row showed.

    Attributes:
        prefill_LTK: expert ids chosen for the prompt's tokens.
        decode_LTK: expert ids chosen for the answer's tokens, the end of the turn left out.
        nats: summed loss of all predicted tokens, in nats.
        num_predicted: number of predicted tokens, prompt and answer.
        answer_nats: summed loss of the answer's tokens and the end of the turn, in nats.
        num_answer_predicted: number of those tokens.
    """

    prefill_LTK: ChoicesLTK
    decode_LTK: ChoicesLTK
    nats: float
    num_predicted: int
    answer_nats: float
    num_answer_predicted: int


def report(
    model_dir: Path | str,
    prompts_dir: Path | str,
    json_out: Path | str | None = None,
    *,
    seed: int = 0,
    max_rows: int = 200,
) -> dict[str, Any]:
    """Measure a model folder on the test split.

    Args:
        model_dir: unpacked Hugging Face folder of a Qwen3-MoE.
        prompts_dir: folder of the prompt corpus.
        json_out: file that receives the report as JSON, if given.
        seed: of the choice of rows and of random batches.
        max_rows: test rows a group, of those with an answer.

    Returns:
        The report; `format_report` shows its content as tables.

    Raises:
        ValueError: model_dir is not a model folder, or the corpus has too few rows.
    """
    groups = choose_rows(prompts_dir, seed, max_rows)
    model, tokenizer = load_model(Path(model_dir))
    measured = _measure(model, tokenizer, groups)
    num_experts = int(model.config.num_experts)
    result: dict[str, Any] = {
        "model": str(model_dir),
        "seed": seed,
        "layers": int(model.config.num_hidden_layers),
        "experts": num_experts,
        "experts_per_token": int(model.config.num_experts_per_tok),
        "loss": _loss_table(measured),
        "correlation": _correlation(measured, num_experts),
        "distinct_experts": _distinct_table(measured, num_experts, seed),
        "required": {
            "correlation": REQUIRED_CORRELATION,
            "change_percent": REQUIRED_CHANGE_PERCENT,
        },
    }
    if json_out is not None:
        out = Path(json_out)
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return result


def failed_requirements(result: dict[str, Any]) -> list[str]:
    """Requirements that a report misses, one sentence each; empty if it meets them all."""
    failures = [
        f"correlation of prefill and decode use over {label} is "
        f"{result['correlation'][key]:.3f}, required >= {REQUIRED_CORRELATION}"
        for key, (label, required) in _CORRELATIONS.items()
        if required
        # `not >=` so that a correlation that is not a number fails as well.
        and not result["correlation"][key] >= REQUIRED_CORRELATION
    ]
    failures += [
        f"distinct experts of {row['groups']} at batch {row['batch']} change by "
        f"{row['change_percent']:+.1f} %, required <= {REQUIRED_CHANGE_PERCENT} %"
        for row in result["distinct_experts"]
        if not row["change_percent"] <= REQUIRED_CHANGE_PERCENT
    ]
    return failures


def format_report(result: dict[str, Any]) -> str:
    """The report as aligned text tables."""
    loss_rows = [
        (
            row["group"],
            row["rows"],
            row["tokens"],
            f"{row['loss']:.2f}",
            row["answer_tokens"],
            f"{row['answer_loss']:.2f}",
        )
        for row in result["loss"]
    ]
    distinct_rows = [
        (
            row["groups"],
            row["batch"],
            f"{row['same']:.1f}",
            f"{row['mixed']:.1f}",
            f"{row['change_percent']:+.1f} %",
        )
        for row in result["distinct_experts"]
    ]
    correlation = result["correlation"]
    return "\n".join(
        [
            f"{result['model']}: {result['layers']} MoE layers, {result['experts']} experts, "
            f"top-{result['experts_per_token']}; test rows, seed {result['seed']}",
            "",
            "Loss (nats a token; prompt and answer, and answer alone)",
            *_table(("group", "rows", "tokens", "loss", "answer tokens", "answer loss"), loss_rows),
            "",
            "Pearson correlation of prefill and decode expert use",
            *_table(
                ("over", "correlation", "required"),
                [
                    (
                        label,
                        f"{correlation[key]:.3f}",
                        f">= {REQUIRED_CORRELATION:.2f}" if required else "",
                    )
                    for key, (label, required) in _CORRELATIONS.items()
                ],
            ),
            "",
            "Distinct experts a layer, one decode token a request: batches of one group or of all",
            *_table(("groups", "batch", "same group", "mixed", "change"), distinct_rows),
            f"(required: change <= {REQUIRED_CHANGE_PERCENT:.0f} %)",
        ]
    )


def _table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    """Lines of a table: first column to the left, numbers to the right."""
    lines = [tuple(header), *(tuple(str(cell) for cell in row) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if position == 0 else cell.rjust(width)
            for position, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    ]


def choose_rows(
    prompts_dir: Path | str, seed: int, max_rows: int, split: str = "test"
) -> dict[str, list[PromptRow]]:
    """Rows of a split with an answer, up to max_rows of each group, chosen by seed."""
    if max_rows < max(BATCH_SIZES):
        raise ValueError(
            f"rows a group must be at least {max(BATCH_SIZES)}, the largest batch, got {max_rows}"
        )
    rng = random.Random(seed)
    answered = [row for row in load_rows(prompts_dir, split) if row.answer]
    chosen = {
        group: rng.sample(rows, min(max_rows, len(rows)))
        for group, rows in rows_by_group(answered).items()
    }
    for group in (*TASK_GROUPS, *LANGUAGE_GROUPS):
        found = len(chosen.get(group, []))
        if found < max(BATCH_SIZES):
            raise ValueError(
                f"group {group!r} has {found} answered {split} rows in {str(prompts_dir)!r}, the "
                f"report needs {max(BATCH_SIZES)}: pass the whole corpus with --prompts"
            )
    return chosen


def load_model(model_dir: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Model, ready to run in float32, and tokenizer of an unpacked folder.

    Raises:
        ValueError: model_dir is not a model folder.
    """
    if not (model_dir / "config.json").is_file():
        raise ValueError(
            f"{str(model_dir)!r} is not a model folder, it has no config.json: run "
            "`eldr demo-model unpack`, or pass another folder with --model"
        )
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    # float32 arithmetic on the bfloat16 weights: exact, and faster than bfloat16 on most CPUs.
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    model.train(False)
    return model, AutoTokenizer.from_pretrained(model_dir)


def _measure(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    groups: dict[str, list[PromptRow]],
) -> dict[str, list[MeasuredRow]]:
    from tqdm import tqdm

    measured: dict[str, list[MeasuredRow]] = {group: [] for group in groups}
    with tqdm(total=sum(map(len, groups.values())), desc="measuring", unit="row") as progress:
        for group, rows in groups.items():
            for row in rows:
                measured[group].append(_measure_row(model, tokenizer, row))
                progress.update()
    return measured


def _measure_row(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, row: PromptRow
) -> MeasuredRow:
    import torch

    prompt, answer = encode(tokenizer, row)
    tokens = torch.tensor([prompt + answer])
    with torch.inference_mode():
        output = model(input_ids=tokens, output_router_logits=True)
    nats_T = torch.nn.functional.cross_entropy(
        output.logits[0, :-1].float(), tokens[0, 1:], reduction="none"
    )
    top_k = int(model.config.num_experts_per_tok)
    choices_LTK = torch.stack(
        [logits_TE.topk(top_k, dim=-1).indices for logits_TE in output.router_logits]
    ).numpy()
    return MeasuredRow(
        prefill_LTK=choices_LTK[:, : len(prompt)],
        # The last token ends the turn: a server samples it, but never runs the model on it.
        decode_LTK=choices_LTK[:, len(prompt) : -1],
        nats=float(nats_T.sum()),
        num_predicted=len(nats_T),
        answer_nats=float(nats_T[len(prompt) - 1 :].sum()),
        num_answer_predicted=len(answer),
    )


def encode(tokenizer: PreTrainedTokenizerBase, row: PromptRow) -> tuple[list[int], list[int]]:
    """Tokens of a row's chat-formatted prompt and of its answer with the end of the turn, cut."""
    prompt = chat.encode_prompt(tokenizer, row)[-_MAX_PROMPT_TOKENS:]
    return prompt, chat.encode_answer(tokenizer, row)[:_MAX_ANSWER_TOKENS]


def _loss_table(measured: dict[str, list[MeasuredRow]]) -> list[dict[str, Any]]:
    table = []
    for group, rows in measured.items():
        tokens = sum(row.num_predicted for row in rows)
        answer_tokens = sum(row.num_answer_predicted for row in rows)
        table.append(
            {
                "group": group,
                "rows": len(rows),
                "tokens": tokens,
                "loss": math.fsum(row.nats for row in rows) / tokens,
                "answer_tokens": answer_tokens,
                "answer_loss": math.fsum(row.answer_nats for row in rows) / answer_tokens,
            }
        )
    return table


def _correlation(measured: dict[str, list[MeasuredRow]], num_experts: int) -> dict[str, float]:
    import numpy as np

    from calibration.demo_model.locality import expert_use, pearson

    prefill, decode, per_request, num_decode_tokens = [], [], [], []
    for rows in measured.values():
        prefill_NLE = np.stack([expert_use(row.prefill_LTK, num_experts) for row in rows])
        decode_NLE = np.stack([expert_use(row.decode_LTK, num_experts) for row in rows])
        prefill.append(prefill_NLE.mean(axis=0))
        decode.append(decode_NLE.mean(axis=0))
        per_request += [pearson(p, d) for p, d in zip(prefill_NLE, decode_NLE, strict=True)]
        num_decode_tokens += [row.decode_LTK.shape[1] for row in rows]
    is_long_N = np.array(num_decode_tokens) >= _MIN_DECODE_TOKENS
    per_request_N = np.array(per_request)
    return {
        "pooled_by_group": pearson(np.stack(prefill), np.stack(decode)),
        "mean_per_request": float(per_request_N[is_long_N].mean()),
        "mean_over_all_requests": float(per_request_N.mean()),
    }


def _distinct_table(
    measured: dict[str, list[MeasuredRow]], num_experts: int, seed: int
) -> list[dict[str, Any]]:
    import numpy as np

    from calibration.demo_model.locality import distinct_experts, mixed_requests

    rng = np.random.default_rng(seed)
    table = []
    for names in (TASK_GROUPS, LANGUAGE_GROUPS):
        groups = [[row.decode_LTK for row in measured[name]] for name in names]
        for batch_size in BATCH_SIZES:
            same = float(
                np.mean(
                    [
                        distinct_experts(group, batch_size, num_experts, _BATCH_REPEATS, rng)
                        for group in groups
                    ]
                )
            )
            mixed = distinct_experts(
                mixed_requests(groups, rng),
                batch_size,
                num_experts,
                _BATCH_REPEATS * len(groups),
                rng,
            )
            table.append(
                {
                    "groups": "/".join(names),
                    "batch": batch_size,
                    "same": same,
                    "mixed": mixed,
                    "change_percent": 100 * (same / mixed - 1),
                }
            )
    return table
