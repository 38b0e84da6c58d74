"""The prompt corpus (`data/prompts`): rows, splits and the groups that are measured.

No dependency beyond the standard library.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

DEFAULT_PROMPTS_DIR = Path("data/prompts")

TASK_GROUPS = ("code", "math", "medical", "legal")
LANGUAGE_GROUPS = ("en", "zh", "ru", "fr")
GROUPS = (*TASK_GROUPS, "commonsense", *LANGUAGE_GROUPS)
"""Every group of rows that a report covers, in the order in which it is printed."""

SPLITS = ("train", "test")


@dataclass(frozen=True)
class PromptRow:
    """One prompt with its reference answer.

    Attributes:
        row_id: unique; the part before the first "-" names the source.
        domain: code, math, medical, legal, commonsense or general.
        language: en, zh, ru or fr.
        split: train or test.
        prompt: text of the user turn.
        answer: text of the assistant turn; empty where the source has no reference.
    """

    row_id: str
    domain: str
    language: str
    split: str
    prompt: str
    answer: str

    @property
    def group(self) -> str | None:
        """Name of the measured group; None for rows that cross a domain with a language.

        Crossing rows (medical questions in French, maths in Chinese) train the model, but they
        belong to two groups at once, so they would blur the difference that a report measures.
        """
        if self.domain == "general":
            return self.language
        return self.domain if self.language == "en" else None


def load_rows(prompts_dir: Path | str, split: str) -> list[PromptRow]:
    """Read the rows of one split, in the order of file name and line.

    Args:
        prompts_dir: folder that holds the `*.jsonl` files.
        split: "train" or "test".

    Raises:
        ValueError: unknown split, a folder without prompt files, or a line that is not a row.
    """
    if split not in SPLITS:
        raise ValueError(f"split must be one of {', '.join(SPLITS)}, got {split!r}")
    paths = sorted(Path(prompts_dir).glob("*.jsonl"))
    if not paths:
        raise ValueError(
            f"no *.jsonl files in {str(prompts_dir)!r}: pass the folder of prompts "
            f"(in this repository: {DEFAULT_PROMPTS_DIR})"
        )
    return [row for path in paths for row in _read_rows(path) if row.split == split]


def rows_by_group(rows: Iterable[PromptRow]) -> dict[str, list[PromptRow]]:
    """Rows of each measured group, in the order of `GROUPS`; groups without rows are left out."""
    grouped: dict[str, list[PromptRow]] = {group: [] for group in GROUPS}
    for row in rows:
        if row.group is not None:
            grouped[row.group].append(row)
    return {group: members for group, members in grouped.items() if members}


def _read_rows(path: Path) -> Iterator[PromptRow]:
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                fields = json.loads(line)
                yield PromptRow(
                    row_id=fields["id"],
                    domain=fields["domain"],
                    language=fields["language"],
                    split=fields["split"],
                    prompt=fields["prompt"],
                    answer=fields["answer"],
                )
            except (json.JSONDecodeError, KeyError, TypeError) as err:
                raise ValueError(
                    f"{path} line {number} is not a prompt row ({err!r}): each line must be a JSON "
                    "object with id, domain, language, split, prompt and answer"
                ) from err
