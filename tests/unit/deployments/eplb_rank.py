"""One of two EPLB ranks on CPU, started by test_eplb.py: `eplb_rank.py RANK STORE PLAN_FOLDER`.

Asks vLLM's policy once per case, moves weights after the last plan by vLLM's own code, and prints
what came out as JSON.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

import numpy as np
import torch
from vllm.distributed import parallel_state
from vllm.distributed.eplb.eplb_communicator import TorchDistNcclEplbCommunicator
from vllm.distributed.eplb.policy import DefaultEplbPolicy
from vllm.distributed.eplb.rebalance_execute import rearrange_expert_weights_inplace
from vllm.plugins import load_general_plugins

from cachemgr.eplb import linear
from deployments.vllm_adapter.eplb import FINGERPRINT, MAX_AGE_S, PLAN_PATH

CASES = ("absent", "damaged", "other_model", "stale", "good")
NUM_RANKS = 2


def main(rank: int, store: str, folder: Path) -> None:
    parallel_state.init_distributed_environment(
        NUM_RANKS, rank, f"file://{store}", local_rank=rank, backend="gloo"
    )
    parallel_state._EPLB = parallel_state.init_model_parallel_group(
        [list(range(NUM_RANKS))], rank, "gloo", group_name="eplb"
    )
    # Only rank 0 has the plans: what rank 1 answers it can have by broadcast alone.
    path = folder / f"plan-of-rank-{rank}.json"
    load_LE = np.load(folder / "load.npy")
    old_LP = linear(len(load_LE), load_LE.shape[1], NUM_RANKS)
    results = {}

    def ask(load_LE: np.ndarray) -> list[list[int]]:
        old = torch.from_numpy(linear(len(load_LE), load_LE.shape[1], NUM_RANKS))
        load = torch.from_numpy(load_LE)
        return DefaultEplbPolicy.rebalance_experts(load, old.shape[1], 1, 1, NUM_RANKS, old)

    results["vllm"] = ask(load_LE).tolist()
    os.environ |= {PLAN_PATH: str(path), FINGERPRINT: "model", MAX_AGE_S: "3600"}
    load_general_plugins()
    for case in CASES:
        if rank == 0 and (folder / f"{case}.json").exists():
            shutil.copy(folder / f"{case}.json", path)
        results[case] = ask(load_LE).tolist()
    plan = ask(load_LE)
    results["vllm, draft"] = ask(load_LE[:1]).tolist()

    num_local = old_LP.shape[1] // NUM_RANKS
    own = slice(rank * num_local, (rank + 1) * num_local)
    weights = [
        [torch.from_numpy(old_P[own, None].astype(np.float32) + np.zeros(3, np.float32))]
        for old_P in old_LP
    ]
    buffer = [torch.empty_like(weights[0][0])]
    group = parallel_state.get_eplb_group().cpu_group
    rearrange_expert_weights_inplace(
        torch.from_numpy(old_LP),
        plan,
        weights,
        buffer,
        group,
        TorchDistNcclEplbCommunicator(ep_group=group),
    )
    results["moved"] = [layer.tolist() for (layer,) in weights]
    print(json.dumps(results))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
