"""Greedy answers of one plain vLLM engine: MODEL DTYPE PROMPTS ANSWERS MAX_TOKENS."""

import json
import os
import sys
from pathlib import Path

os.environ.update(
    VLLM_CPU_KVCACHE_SPACE="1",
    OMP_NUM_THREADS="1",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    VLLM_LOGGING_LEVEL="WARNING",
)


def main() -> None:
    from vllm import LLM, SamplingParams

    model, dtype, prompts, answers, max_tokens = sys.argv[1:]
    engine = LLM(model=model, dtype=dtype, enforce_eager=True, max_model_len=2048)
    params = SamplingParams(max_tokens=int(max_tokens), temperature=0)
    result = {}
    for prompt_id, text in json.loads(Path(prompts).read_text()).items():
        # One at a time: the reference must not depend on how requests happen to be batched.
        (output,) = engine.chat([{"role": "user", "content": text}], params, use_tqdm=False)
        choice = output.outputs[0]
        result[prompt_id] = {"token_ids": list(choice.token_ids), "text": choice.text}
    Path(answers).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
