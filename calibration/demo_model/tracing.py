"""A routing trace of the demo model: expert choices and router logits, token by token.

Test rows by default, which the model has not seen; a row's chat-formatted prompt is the prompt, its
reference answer, teacher-forced, stands for decode. `calibration/traces.py` reads the file.

Axes: T tokens of all requests, L MoE layers, E experts, k experts a token chooses.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from calibration.demo_model.reporting import choose_rows, encode, load_model
from calibration.storage import write_whole


def write_trace(
    model_dir: Path | str,
    prompts_dir: Path | str,
    out: Path | str,
    *,
    seed: int = 0,
    max_rows: int = 200,
    split: str = "test",
) -> dict[str, int]:
    """Run rows of the corpus through the model and write what its router did.

    Args:
        model_dir: unpacked Hugging Face folder of a Qwen3-MoE of at most 256 experts.
        prompts_dir: folder of the prompt corpus.
        out: .npz to write: `ids` uint8 [layer, rank, token], `logits` float16 [layer, expert,
            token], `offsets`, `prefix_tokens`, `domain`.
        seed: of the choice of rows.
        max_rows: rows a group, of those with an answer.
        split: of the corpus, test or train.

    Returns:
        Numbers of requests and tokens.

    Raises:
        ValueError: model_dir is not a model folder, or the corpus has too few rows.
    """
    import torch

    groups = choose_rows(prompts_dir, seed, max_rows, split)
    model, tokenizer = load_model(Path(model_dir))
    top_k = int(model.config.num_experts_per_tok)
    ids_LkT, logits_LET, lengths, prefixes, domains = [], [], [], [], []
    rows = [(group, row) for group, members in groups.items() for row in members]
    for group, row in tqdm(rows, desc="tracing", unit="row"):
        prompt, answer = encode(tokenizer, row)
        # The last token ends the turn: a server samples it, but never runs the model on it.
        tokens = prompt + answer[:-1]
        with torch.inference_mode():
            output = model(input_ids=torch.tensor([tokens]), output_router_logits=True)
        logits_LTE = torch.stack(output.router_logits)
        ids_LkT.append(logits_LTE.topk(top_k, dim=-1).indices.mT.numpy().astype(np.uint8))
        logits_LET.append(logits_LTE.mT.numpy().astype(np.float16))
        lengths.append(len(tokens))
        prefixes.append(len(prompt))
        domains.append(group)
    arrays: dict[str, Any] = {
        "ids": np.concatenate(ids_LkT, axis=2),
        "logits": np.concatenate(logits_LET, axis=2),
        "offsets": np.concatenate([[0], np.cumsum(lengths)]),
        "prefix_tokens": np.array(prefixes),
        "domain": np.array(domains),
    }

    def write(path: Path) -> None:
        with path.open("wb") as stream:  # np.savez would add .npz to other names
            np.savez(stream, **arrays)

    write_whole(Path(out), write)
    return {"requests": len(lengths), "tokens": int(np.sum(lengths))}
