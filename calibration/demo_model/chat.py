"""Tokenizer and chat format of the demo model: byte-level BPE and ChatML.

What the chat template renders is what the model is trained on (`encode_row`), so a served request
looks to the model like a training row. Tools follow the Hermes convention (`<tools>`,
`<tool_call>`, `<tool_response>`), which vLLM's `hermes` tool parser reads.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from calibration.demo_model.chat_template import CHAT_TEMPLATE
from calibration.demo_model.corpus import PromptRow

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PAD_TOKEN = "<|endoftext|>"
TURN_START = "<|im_start|>"
TURN_END = "<|im_end|>"
SPECIAL_TOKENS = (PAD_TOKEN, TURN_START, TURN_END)

MAX_CONTEXT_TOKENS = 2048


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerBase:
    """Learn a byte-level BPE vocabulary and attach the chat template.

    Args:
        texts: training texts, UTF-8.
        vocab_size: number of token ids, special tokens and the 256 bytes included.

    Returns:
        A tokenizer whose end of sequence is `<|im_end|>` and whose padding is `<|endoftext|>`.

    Raises:
        ValueError: vocab_size leaves no room for the bytes and the special tokens.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    smallest = 256 + len(SPECIAL_TOKENS)
    if vocab_size < smallest:
        raise ValueError(
            f"vocab_size must be at least {smallest} (256 bytes and {len(SPECIAL_TOKENS)} special "
            f"tokens), got {vocab_size}"
        )
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    bpe.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=list(SPECIAL_TOKENS),
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    tokenizer: PreTrainedTokenizerBase = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=bpe,
        eos_token=TURN_END,
        pad_token=PAD_TOKEN,
        additional_special_tokens=[TURN_START],
        model_max_length=MAX_CONTEXT_TOKENS,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def save_tokenizer(tokenizer: PreTrainedTokenizerBase, out_dir: Path) -> None:
    """Write the tokenizer files under the class name that every transformers release knows.

    transformers 5 writes its own backend class into tokenizer_config.json, a name that earlier
    releases refuse; `PreTrainedTokenizerFast` loads in both.
    """
    tokenizer.save_pretrained(out_dir)
    config_path = out_dir / "tokenizer_config.json"
    config = json.loads(config_path.read_text(encoding="utf-8"))
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    config_path.write_text(
        json.dumps(config, indent=2, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8"
    )


def encode_row(tokenizer: PreTrainedTokenizerBase, row: PromptRow) -> list[int]:
    """Token ids of a row as the chat template renders it; without an answer, the prompt alone."""
    messages = [{"role": "user", "content": row.prompt}]
    if row.answer:
        messages.append({"role": "assistant", "content": row.answer})
    return _encode_messages(tokenizer, messages, add_generation_prompt=False)


def encode_prompt(tokenizer: PreTrainedTokenizerBase, row: PromptRow) -> list[int]:
    """Token ids of a row's prompt as a server sends it to prefill, assistant header included."""
    return _encode_messages(
        tokenizer, [{"role": "user", "content": row.prompt}], add_generation_prompt=True
    )


def encode_answer(tokenizer: PreTrainedTokenizerBase, row: PromptRow) -> list[int]:
    """Token ids that decode would produce for a row: its answer and the end of the turn."""
    return list(tokenizer.encode(row.answer + TURN_END, add_special_tokens=False))


def _encode_messages(
    tokenizer: PreTrainedTokenizerBase,
    messages: list[dict[str, str]],
    *,
    add_generation_prompt: bool,
) -> list[int]:
    text = tokenizer.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=add_generation_prompt
    )
    return list(tokenizer.encode(str(text), add_special_tokens=False))
