"""Training of the demo model: a small Qwen3-MoE on the train split of the prompt corpus.

Array legend: B sequences a step, S tokens a sequence.
"""

from __future__ import annotations

import json
import logging
import math
import random
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from calibration.demo_model import chat
from calibration.demo_model.corpus import load_rows
from calibration.demo_model.packing import make_readable

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase, Qwen3MoeConfig, Qwen3MoeForCausalLM

logger = logging.getLogger(__name__)

TRAINING_RECORD_FILE = "training.json"


@dataclass(frozen=True)
class DemoModelShape:
    """Sizes of the network; the defaults are those of the bundled model (23 M parameters).

    `hidden_size` and `expert_width` are multiples of 32: vLLM's CPU kernel for experts needs it.
    """

    vocab_size: int = 8192
    hidden_size: int = 192
    num_layers: int = 6
    num_heads: int = 6
    num_kv_heads: int = 2
    head_dim: int = 32
    num_experts: int = 64
    num_experts_per_token: int = 4
    expert_width: int = 96

    def __post_init__(self) -> None:
        for name in ("hidden_size", "expert_width"):
            size = getattr(self, name)
            if size <= 0 or size % 32:
                raise ValueError(
                    f"{name} must be a positive multiple of 32 (vLLM's CPU kernel for experts), "
                    f"got {size}"
                )
        if not 0 < self.num_experts_per_token <= self.num_experts:
            raise ValueError(
                f"num_experts_per_token must be in [1, {self.num_experts}] (num_experts), "
                f"got {self.num_experts_per_token}"
            )


@dataclass(frozen=True)
class TrainingOptions:
    """How the network is trained; the defaults gave the bundled model.

    Attributes:
        seed: of initial weights and of the order of rows.
        steps: optimiser steps.
        max_minutes: wall-clock limit; training that reaches it stops early and records so.
        sequences_per_step: B.
        sequence_tokens: S.
        learning_rate: peak of the cosine schedule, reached after `warmup_steps`.
        balance_loss: weight of the load-balancing loss. Small on purpose: a strong one spreads
            every domain over all experts and leaves no locality to route by.
        max_row_tokens: longer rows are cut, so that a few do not dominate a step.
    """

    seed: int = 0
    steps: int = 1800
    max_minutes: float = 40.0
    sequences_per_step: int = 4
    sequence_tokens: int = 512
    learning_rate: float = 2e-3
    final_learning_rate_share: float = 0.1
    warmup_steps: int = 50
    weight_decay: float = 0.1
    balance_loss: float = 0.01
    max_row_tokens: int = 768
    shape: DemoModelShape = field(default_factory=DemoModelShape)

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ValueError(f"steps must be at least 1, got {self.steps}")
        if not self.max_minutes > 0:
            raise ValueError(f"max_minutes must be positive, got {self.max_minutes}")

    @property
    def tokens_per_step(self) -> int:
        return self.sequences_per_step * self.sequence_tokens


def train(
    prompts_dir: Path | str,
    out_dir: Path | str,
    seed: int = 0,
    steps: int = TrainingOptions.steps,
    max_minutes: float = TrainingOptions.max_minutes,
    **options: Any,
) -> dict[str, Any]:
    """Train the demo model and write it as a Hugging Face folder in bfloat16.

    The result is reproducible for one seed, one torch release and one number of threads.

    Args:
        prompts_dir: folder of the prompt corpus; its train rows are used.
        out_dir: folder to write: weights, configuration, tokenizer, chat template and
            `training.json`, the record that is also returned.
        seed: of initial weights and of the order of rows.
        steps: optimiser steps.
        max_minutes: wall-clock limit in minutes.
        **options: further fields of `TrainingOptions`.

    Returns:
        The training record: options, number of tokens, seconds, loss curve.

    Raises:
        ValueError: an option is out of range, or the corpus is empty.
    """
    settings = TrainingOptions(seed=seed, steps=steps, max_minutes=max_minutes, **options)
    rows = load_rows(prompts_dir, "train")
    if not rows:
        raise ValueError(f"{str(prompts_dir)!r} has no rows of the train split")
    out = Path(out_dir)
    out.mkdir(parents=True, exist_ok=True)

    tokenizer = chat.train_tokenizer(
        (f"{row.prompt}\n{row.answer}" for row in rows), settings.shape.vocab_size
    )
    sequences = [chat.encode_row(tokenizer, row)[: settings.max_row_tokens] for row in rows]
    logger.info("%d train rows, %d tokens", len(rows), sum(map(len, sequences)))

    model = _build_model(tokenizer, settings)
    record = _optimise(model, sequences, settings)
    record["corpus"] = {"rows": len(rows), "tokens": sum(map(len, sequences))}
    _save(model, tokenizer, record, out)
    return record


def demo_config(tokenizer: PreTrainedTokenizerBase, settings: TrainingOptions) -> Qwen3MoeConfig:
    """Qwen3-MoE configuration for the given sizes; every layer is an MoE layer."""
    from transformers import Qwen3MoeConfig

    shape = settings.shape
    fields: dict[str, Any] = {
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        # Width of a dense feed-forward layer. There is none, but vLLM reads the field.
        "intermediate_size": shape.num_experts_per_token * shape.expert_width,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "moe_intermediate_size": shape.expert_width,
        "num_experts": shape.num_experts,
        "num_experts_per_tok": shape.num_experts_per_token,
        "max_position_embeddings": chat.MAX_CONTEXT_TOKENS,
        "norm_topk_prob": True,
        "mlp_only_layers": [],
        "tie_word_embeddings": True,
        "router_aux_loss_coef": settings.balance_loss,
        "rope_theta": 10000.0,
        "pad_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "bos_token_id": None,
    }
    return Qwen3MoeConfig(**fields)


def _build_model(
    tokenizer: PreTrainedTokenizerBase, settings: TrainingOptions
) -> Qwen3MoeForCausalLM:
    import torch
    from transformers import Qwen3MoeForCausalLM

    torch.manual_seed(settings.seed)
    config = demo_config(tokenizer, settings)
    # One grouped matrix product for all experts of a layer; the default loops over experts.
    config._experts_implementation = "grouped_mm"
    model: Qwen3MoeForCausalLM = Qwen3MoeForCausalLM._from_config(  # type: ignore[no-untyped-call]
        config
    )
    return model


def _token_batches(sequences: list[list[int]], settings: TrainingOptions) -> Iterator[torch.Tensor]:
    """Endless int64 batches of shape (B, S): shuffled rows, end to end, without padding."""
    import torch

    rng = random.Random(settings.seed)
    order = list(range(len(sequences)))
    tokens: list[int] = []
    while True:
        rng.shuffle(order)
        for index in order:
            tokens += sequences[index]
            while len(tokens) >= settings.tokens_per_step:
                batch, tokens = (
                    tokens[: settings.tokens_per_step],
                    tokens[settings.tokens_per_step :],
                )
                yield torch.tensor(batch).view(
                    settings.sequences_per_step, settings.sequence_tokens
                )


def _learning_rate_factor(step: int, settings: TrainingOptions) -> float:
    """Share of the peak learning rate at a step, in (0, 1]: linear warm-up, then half a cosine."""
    floor = settings.final_learning_rate_share
    cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, step / settings.steps)))
    return min(1.0, (step + 1) / settings.warmup_steps) * (floor + (1 - floor) * cosine)


def _optimise(
    model: Qwen3MoeForCausalLM, sequences: list[list[int]], settings: TrainingOptions
) -> dict[str, Any]:
    """Run the optimiser steps in place and return the record of the run."""
    import torch
    from tqdm import tqdm

    model.train()
    optimiser = torch.optim.AdamW(
        model.parameters(),
        lr=settings.learning_rate,
        betas=(0.9, 0.95),
        weight_decay=settings.weight_decay,
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimiser, lambda step: _learning_rate_factor(step, settings)
    )
    losses: list[float] = []
    stopped_early = False
    started = time.monotonic()
    progress = tqdm(total=settings.steps, desc="training", unit="step", mininterval=2.0)
    with progress:
        for batch_BS in _token_batches(sequences, settings):
            # The balance loss belongs to training only: asking for it here keeps the saved
            # configuration as a server wants it.
            output = model(input_ids=batch_BS, labels=batch_BS, output_router_logits=True)
            output.loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimiser.step()
            schedule.step()
            optimiser.zero_grad(set_to_none=True)

            balance = settings.balance_loss * output.aux_loss.item()
            losses.append(output.loss.item() - balance)
            elapsed_s = time.monotonic() - started
            tokens_per_s = len(losses) * settings.tokens_per_step / elapsed_s
            progress.set_postfix_str(f"loss {losses[-1]:.3f}, {tokens_per_s:.0f} tokens/s", False)
            progress.update()
            if len(losses) >= settings.steps:
                break
            if elapsed_s > 60 * settings.max_minutes:
                stopped_early = True
                logger.warning(
                    "stopped after %d of %d steps: the limit of %g minutes was reached; use fewer "
                    "steps or a higher limit for a full learning-rate schedule",
                    len(losses),
                    settings.steps,
                    settings.max_minutes,
                )
                break
    return {
        "options": asdict(settings),
        "num_parameters": sum(p.numel() for p in model.parameters()),
        "steps_done": len(losses),
        "stopped_early": stopped_early,
        "tokens_seen": len(losses) * settings.tokens_per_step,
        "seconds": round(time.monotonic() - started, 1),
        "torch_version": str(torch.__version__),
        "num_threads": torch.get_num_threads(),
        "loss_curve": _loss_curve(losses),
    }


def _loss_curve(losses: list[float], points: int = 60) -> list[dict[str, float]]:
    """Mean loss (nats a token) of about `points` equal stretches; `step` is the last of each."""
    stretch = max(1, math.ceil(len(losses) / points))
    curve = []
    for first in range(0, len(losses), stretch):
        part = losses[first : first + stretch]
        curve.append({"step": first + len(part), "loss": round(sum(part) / len(part), 4)})
    return curve


def _save(
    model: Qwen3MoeForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    record: dict[str, Any],
    out_dir: Path,
) -> None:
    import torch
    from transformers import GenerationConfig

    model.generation_config = GenerationConfig(  # type: ignore[no-untyped-call]
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    # Module.to is wrapped by transformers in a way that hides its signature.
    model.to(torch.bfloat16).save_pretrained(out_dir)  # type: ignore[arg-type]
    make_readable(out_dir)
    chat.save_tokenizer(tokenizer, out_dir)
    (out_dir / TRAINING_RECORD_FILE).write_text(
        json.dumps(record, indent=1) + "\n", encoding="utf-8"
    )
