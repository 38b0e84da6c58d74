from pathlib import Path

import pytest

from calibration.capture import Prompt, read_prompts, sample


def test_rows_may_hold_odd_line_separators(tmp_path: Path) -> None:
    text = '{"id": "a", "domain": "code", "split": "test", "prompt": "x\u2028y\x85z"}\n'
    (tmp_path / "p.jsonl").write_text(text + '{"prompt": "q", "language": "fr"}\n')
    first, second = read_prompts(tmp_path)
    assert first == Prompt("a", "x\u2028y\x85z", "code")
    assert second == Prompt("p-2", "q", "fr")
    assert read_prompts(tmp_path / "p.jsonl", "test") == [first]


@pytest.mark.parametrize("line", ["no json", "[]", '{"text": "x"}'])
def test_bad_rows_are_named(tmp_path: Path, line: str) -> None:
    (tmp_path / "p.jsonl").write_text('{"prompt": "x"}\n' + line)
    with pytest.raises(ValueError, match=r"p\.jsonl:2: not a JSON object with `prompt`"):
        read_prompts(tmp_path)


def test_missing_prompts_are_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no prompts at"):
        read_prompts(tmp_path)


def test_sample_takes_labels_evenly_and_repeats_with_its_seed() -> None:
    prompts = [Prompt(f"{label}{i}", "x", label) for label in "abc" for i in range(10)]
    chosen = sample(prompts, 8, seed=3)
    counts = sorted(sum(p.label == label for p in chosen) for label in "abc")
    assert counts == [2, 3, 3]
    assert chosen == sample(prompts, 8, seed=3)
    assert len(sample(prompts, 99, seed=3)) == 30
    with pytest.raises(ValueError, match="at least one prompt"):
        sample([], 5, seed=0)
