"""Demo model: training, packing and measuring, on a network of a few kilobytes."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from calibration.demo_model import (
    PackedModelError,
    add_cli,
    failed_requirements,
    format_report,
    pack,
    report,
    train,
    unpack,
)
from calibration.demo_model.corpus import PromptRow, load_rows
from calibration.demo_model.locality import distinct_experts, expert_use, mixed_requests
from calibration.demo_model.packing import (
    DEFAULT_PACKED_DIR,
    MANIFEST_FILE,
    PACKED_WEIGHTS_FILE,
    STAMP_FILE,
    WEIGHTS_FILE,
    verify_packed,
)
from calibration.demo_model.reporting import encode
from calibration.demo_model.tracing import write_trace
from calibration.traces import load_trace
from calibration.transforms import ALL_EXPERTS, ExpertUse

REPOSITORY = Path(__file__).resolve().parents[2]
GROUP_FIELDS = {
    **{name: (name, "en") for name in ("code", "math", "medical", "legal", "commonsense")},
    **{name: ("general", name) for name in ("en", "zh", "ru", "fr")},
}


def write_corpus(folder: Path, rows_per_group: int = 36) -> Path:
    """A small corpus in the format of data/prompts: every group, both splits."""
    folder.mkdir(parents=True, exist_ok=True)
    for group, (domain, language) in GROUP_FIELDS.items():
        rows = [
            {
                "id": f"{group}-{split}-{number}",
                "domain": domain,
                "language": language,
                "split": split,
                "prompt": f"{group} question {number}: what follows {number}?",
                "answer": f"{group} answer {number + 1}",
            }
            for split in ("train", "test")
            for number in range(rows_per_group)
        ]
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{group}.jsonl").write_text(text, encoding="utf-8")
    return folder


def train_tiny(prompts_dir: Path, out_dir: Path, **options: Any) -> dict[str, Any]:
    from calibration.demo_model.training import DemoModelShape

    shape = DemoModelShape(
        vocab_size=300,
        hidden_size=32,
        num_layers=2,
        num_heads=2,
        num_kv_heads=1,
        head_dim=16,
        num_experts=8,
        num_experts_per_token=2,
        expert_width=32,
    )
    return train(
        prompts_dir,
        out_dir,
        **{"steps": 2, "shape": shape, "sequences_per_step": 2, "sequence_tokens": 32, **options},
    )


@pytest.fixture(scope="module")
def corpus_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def trained_dir(corpus_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    out_dir = tmp_path_factory.mktemp("trained")
    train_tiny(corpus_dir, out_dir)
    return out_dir


@pytest.fixture
def packed_dir(trained_dir: Path, tmp_path: Path) -> Path:
    pack(trained_dir, tmp_path / "packed")
    return tmp_path / "packed"


@pytest.fixture
def tokenizer(trained_dir: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(trained_dir)


def load_weights(folder: Path, name: str = WEIGHTS_FILE) -> dict[str, Any]:
    from safetensors.torch import load_file

    return dict(load_file(folder / name))


# --- training -------------------------------------------------------------------------------------


def test_training_writes_a_model_folder_with_its_record(trained_dir: Path) -> None:
    record = json.loads((trained_dir / "training.json").read_text())
    config = json.loads((trained_dir / "config.json").read_text())
    tokenizer_config = json.loads((trained_dir / "tokenizer_config.json").read_text())

    assert record["steps_done"] == 2
    assert record["stopped_early"] is False
    assert [point["step"] for point in record["loss_curve"]] == [1, 2]
    assert config["architectures"] == ["Qwen3MoeForCausalLM"]
    assert config["tie_word_embeddings"] is True
    assert config["max_position_embeddings"] == 2048
    assert config["eos_token_id"] == 2
    assert config["dtype"] == "bfloat16"
    assert not config.get("output_router_logits", False), "a server would compute a training loss"
    assert tokenizer_config["tokenizer_class"] == "PreTrainedTokenizerFast"


def test_training_is_reproducible_and_depends_on_the_seed(
    corpus_dir: Path, trained_dir: Path, tmp_path: Path
) -> None:
    import torch

    train_tiny(corpus_dir, tmp_path / "again")
    train_tiny(corpus_dir, tmp_path / "other", seed=1)
    first, again, other = (
        load_weights(folder) for folder in (trained_dir, tmp_path / "again", tmp_path / "other")
    )

    assert all(torch.equal(first[name], again[name]) for name in first)
    assert any(not torch.equal(first[name], other[name]) for name in first)


def test_training_stops_at_the_time_limit_and_says_so(corpus_dir: Path, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    record = train_tiny(corpus_dir, tmp_path / "out", steps=1000, max_minutes=1e-9)

    assert record["steps_done"] == 1
    assert record["stopped_early"] is True


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": 0}, "steps must be at least 1, got 0"),
        ({"max_minutes": 0}, "max_minutes must be positive, got 0"),
    ],
)
def test_training_refuses_options_out_of_range(
    options: dict[str, Any], message: str, corpus_dir: Path, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        train(corpus_dir, tmp_path, **options)


def test_expert_width_must_suit_the_cpu_kernel() -> None:
    from calibration.demo_model.training import DemoModelShape

    with pytest.raises(
        ValueError, match=r"expert_width must be a positive multiple of 32.*got 100"
    ):
        DemoModelShape(expert_width=100)


# --- corpus ---------------------------------------------------------------------------------------


def test_rows_that_cross_domain_and_language_belong_to_no_group() -> None:
    def group(domain: str, language: str) -> str | None:
        return PromptRow("id", domain, language, "train", "prompt", "answer").group

    assert group("math", "en") == "math"
    assert group("general", "zh") == "zh"
    assert group("math", "zh") is None


def test_a_bad_corpus_line_is_named(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"id": "x"}\n')

    with pytest.raises(ValueError, match=r"rows\.jsonl line 1 is not a prompt row"):
        load_rows(tmp_path, "train")


def test_a_folder_without_prompts_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no \*\.jsonl files"):
        load_rows(tmp_path, "train")


# --- chat format ----------------------------------------------------------------------------------


def render(tokenizer: Any, messages: list[dict[str, Any]], **options: Any) -> str:
    return str(tokenizer.apply_chat_template(messages, tokenize=False, **options))


def test_training_rows_read_as_the_template_renders_them(tokenizer: Any) -> None:
    from calibration.demo_model.chat import encode_answer, encode_prompt, encode_row

    row = PromptRow("id", "code", "en", "train", "one?", "two")
    expected = "<|im_start|>user\none?<|im_end|>\n<|im_start|>assistant\ntwo<|im_end|>\n"

    assert tokenizer.decode(encode_row(tokenizer, row)) == expected
    served = encode_prompt(tokenizer, row) + encode_answer(tokenizer, row)
    assert tokenizer.decode(served) + "\n" == expected
    assert served[-1] == tokenizer.eos_token_id


def test_a_row_without_answer_is_its_prompt_alone(tokenizer: Any) -> None:
    from calibration.demo_model.chat import encode_row

    row = PromptRow("id", "code", "en", "train", "one?", "")

    assert tokenizer.decode(encode_row(tokenizer, row)) == "<|im_start|>user\none?<|im_end|>\n"


def test_content_may_be_a_list_of_text_parts(tokenizer: Any) -> None:
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    as_parts = [{"role": "system", "content": parts}, {"role": "user", "content": parts}]
    as_text = [{**message, "content": "one two"} for message in as_parts]

    assert render(tokenizer, as_parts) == render(tokenizer, as_text)


def test_an_image_part_is_refused_by_name(tokenizer: Any) -> None:
    messages = [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]

    with pytest.raises(Exception, match=r'"image_url" in a user message.*text only'):
        render(tokenizer, messages)


def test_an_unknown_role_is_refused_by_name(tokenizer: Any) -> None:
    with pytest.raises(Exception, match='role "critic" is not known'):
        render(tokenizer, [{"role": "critic", "content": "x"}])


def test_tools_are_rendered_in_the_hermes_convention(tokenizer: Any) -> None:
    tool = {"type": "function", "function": {"name": "weather", "parameters": {}}}
    calls = [
        {"type": "function", "function": {"name": "weather", "arguments": {"city": "Zürich"}}},
        {"type": "function", "function": {"name": "weather", "arguments": '{"city": "Bern"}'}},
    ]
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "content": "sun"},
        {"role": "tool", "content": "rain"},
    ]

    text = render(tokenizer, messages, tools=[tool], add_generation_prompt=True)

    system, conversation = text.split("<|im_end|>\n", 1)
    assert system.startswith("<|im_start|>system\nBe brief.\n\n# Tools\n")
    assert f"<tools>\n{json.dumps(tool)}\n</tools>" in system
    assert conversation == (
        "<|im_start|>user\nWeather?<|im_end|>\n"
        "<|im_start|>assistant\n"
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Zürich"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Bern"}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\nsun\n</tool_response>\n"
        "<tool_response>\nrain\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )


# --- packing --------------------------------------------------------------------------------------


def test_unpacked_weights_differ_by_half_a_quantisation_step_at_most(
    trained_dir: Path, packed_dir: Path, tmp_path: Path
) -> None:
    import torch

    assert unpack(packed_dir, tmp_path / "model") is True
    exact, restored = load_weights(trained_dir), load_weights(tmp_path / "model")

    assert exact.keys() == restored.keys()
    for name, weight in exact.items():
        assert restored[name].dtype == torch.bfloat16
        if not name.endswith("_proj.weight"):
            assert torch.equal(restored[name], weight), f"{name} should be stored exactly"
            continue
        largest = weight.float().abs().amax(dim=-1, keepdim=True)
        error = (restored[name].float() - weight.float()).abs()
        # Half a step of 1/127 of the row's largest weight, and bfloat16's rounding (2**-8).
        assert torch.all(error <= largest * (0.5 / 127 + 2**-8) * 1.001), name


def test_packed_projections_take_one_byte_a_weight(trained_dir: Path, packed_dir: Path) -> None:
    import torch

    packed = load_weights(packed_dir, PACKED_WEIGHTS_FILE)
    projections = [name for name in packed if name.endswith("_proj.weight")]

    assert len(projections) == 2 * (4 + 8 * 3)
    assert all(packed[name].dtype == torch.int8 for name in projections)


def test_a_row_of_zeros_stays_zero() -> None:
    torch = pytest.importorskip("torch")
    from calibration.demo_model.packing import dequantise_rows, quantise_rows

    integers, scales = quantise_rows(torch.tensor([[0.0, 0.0], [-2.0, 1.0]]))

    assert integers.tolist() == [[0, 0], [-127, 64]]
    assert scales.tolist() == pytest.approx([0.0, 2 / 127])
    assert dequantise_rows(integers, scales)[0].tolist() == [0.0, 0.0]


def test_unpacked_folder_loads_and_generates(packed_dir: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    unpack(packed_dir, tmp_path / "model")
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    inputs = tokenizer("<|im_start|>user\nhello", return_tensors="pt")

    tokens = model.generate(inputs["input_ids"], max_new_tokens=3, do_sample=False)

    assert tokens.shape[1] > inputs["input_ids"].shape[1]


def test_unpack_is_idempotent_and_repairs_a_cut_file(packed_dir: Path, tmp_path: Path) -> None:
    out_dir = tmp_path / "deep" / "model"
    assert unpack(packed_dir, out_dir) is True
    written_at = (out_dir / WEIGHTS_FILE).stat().st_mtime_ns

    assert unpack(packed_dir, out_dir) is False
    assert (out_dir / WEIGHTS_FILE).stat().st_mtime_ns == written_at

    (out_dir / WEIGHTS_FILE).write_bytes(b"cut")
    assert unpack(packed_dir, out_dir) is True
    assert (out_dir / WEIGHTS_FILE).stat().st_size > 3
    assert [path.name for path in out_dir.parent.iterdir()] == ["model"], "no staging folder stays"


def test_unpack_replaces_an_older_model(corpus_dir: Path, packed_dir: Path, tmp_path: Path) -> None:
    unpack(packed_dir, tmp_path / "model")
    before = (tmp_path / "model" / STAMP_FILE).read_text()
    train_tiny(corpus_dir, tmp_path / "newer", seed=7)
    pack(tmp_path / "newer", packed_dir)

    assert unpack(packed_dir, tmp_path / "model") is True
    assert (tmp_path / "model" / STAMP_FILE).read_text() != before


def test_unpack_leaves_a_folder_alone_that_it_did_not_write(
    packed_dir: Path, tmp_path: Path
) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("keep")

    with pytest.raises(ValueError, match="was not written by unpack"):
        unpack(packed_dir, tmp_path / "mine")
    assert (tmp_path / "mine" / "notes.txt").read_text() == "keep"


def test_a_corrupted_packed_file_is_refused(packed_dir: Path, tmp_path: Path) -> None:
    path = packed_dir / PACKED_WEIGHTS_FILE
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)

    with pytest.raises(PackedModelError, match=rf"{PACKED_WEIGHTS_FILE}' is corrupted: SHA-256"):
        unpack(packed_dir, tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_a_cut_packed_file_is_refused(packed_dir: Path, tmp_path: Path) -> None:
    path = packed_dir / "tokenizer.json"
    path.write_bytes(path.read_bytes()[:100])

    with pytest.raises(PackedModelError, match=r"bytes 100, but manifest\.json says"):
        unpack(packed_dir, tmp_path / "model")


def test_a_missing_packed_file_is_refused(packed_dir: Path, tmp_path: Path) -> None:
    (packed_dir / "config.json").unlink()

    with pytest.raises(PackedModelError, match=r"config\.json' is missing"):
        unpack(packed_dir, tmp_path / "model")


@pytest.mark.parametrize(
    ("manifest", "message"),
    [
        ("{", "is not JSON"),
        ('{"format": "int4"}', "has format 'int4', this release reads 'int8-rows-1'"),
        ('{"format": "int8-rows-1", "files": {}}', "lists no weights"),
        (
            '{"format": "int8-rows-1", "files": {"weights.int8.safetensors": {}, "../x": {}}}',
            "only plain file names",
        ),
    ],
)
def test_a_bad_manifest_is_refused(manifest: str, message: str, tmp_path: Path) -> None:
    (tmp_path / MANIFEST_FILE).write_text(manifest)

    with pytest.raises(PackedModelError, match=message):
        verify_packed(tmp_path)


def test_a_folder_without_manifest_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PackedModelError, match=r"is not a packed model, it has no manifest\.json"):
        unpack(tmp_path, tmp_path / "model")


def test_packing_something_else_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"is not a model folder, it lacks config\.json"):
        pack(tmp_path, tmp_path / "packed")


# --- the bundled model ----------------------------------------------------------------------------


def test_bundled_model_matches_its_manifest_and_stays_small() -> None:
    manifest = verify_packed(REPOSITORY / DEFAULT_PACKED_DIR)

    assert sum(entry["bytes"] for entry in manifest["files"].values()) <= 40e6
    config = json.loads((REPOSITORY / DEFAULT_PACKED_DIR / "config.json").read_text())
    assert config["num_hidden_layers"] >= 6
    assert config.get("num_experts", config.get("num_local_experts")) == 64
    assert config["num_experts_per_tok"] == 4
    assert config["hidden_size"] % 32 == 0
    assert config["moe_intermediate_size"] % 32 == 0


def test_bundled_chat_template_is_that_of_the_source() -> None:
    from calibration.demo_model.chat_template import CHAT_TEMPLATE

    bundled = REPOSITORY / DEFAULT_PACKED_DIR / "chat_template.jinja"
    assert bundled.read_text(encoding="utf-8") == CHAT_TEMPLATE


# --- measures -------------------------------------------------------------------------------------


def test_expert_use_counts_choices_per_token() -> None:
    choices_LTK = np.array([[[0, 1], [0, 2]], [[3, 1], [3, 1]]])

    assert expert_use(choices_LTK, 4).tolist() == [[1.0, 0.5, 0.5, 0.0], [0.0, 1.0, 0.0, 1.0]]


def test_distinct_experts_of_equal_and_of_disjoint_requests() -> None:
    rng = np.random.default_rng(0)
    equal = [np.array([[[0, 1]]])] * 4
    disjoint = [np.array([[[2 * n, 2 * n + 1]]]) for n in range(4)]

    assert distinct_experts(equal, 4, 8, repeats=3, rng=rng) == 2
    assert distinct_experts(disjoint, 4, 8, repeats=3, rng=rng) == 8


def test_a_batch_larger_than_the_group_is_refused() -> None:
    with pytest.raises(ValueError, match="batch of 8 needs as many requests, got 1"):
        distinct_experts([np.zeros((1, 1, 1), int)], 8, 4, repeats=1, rng=np.random.default_rng(0))


def test_mixed_requests_take_as_many_of_each_group() -> None:
    groups = [[np.full((1, 1, 1), label)] * size for label, size in ((0, 5), (1, 2))]

    mixed = mixed_requests(groups, np.random.default_rng(0))

    assert sorted(int(request.item()) for request in mixed) == [0, 0, 1, 1]


def make_report(correlation: float = 0.8, change_percent: float = -20.0) -> dict[str, Any]:
    return {
        "model": "m",
        "seed": 0,
        "layers": 6,
        "experts": 64,
        "experts_per_token": 4,
        "loss": [
            {
                "group": "code",
                "rows": 1,
                "tokens": 10,
                "loss": 4.0,
                "answer_tokens": 3,
                "answer_loss": 3.5,
            }
        ],
        "correlation": {
            "pooled_by_group": correlation,
            "mean_per_request": correlation,
            "mean_over_all_requests": 0.5,
        },
        "distinct_experts": [
            {
                "groups": "code/math",
                "batch": 8,
                "same": 16.0,
                "mixed": 20.0,
                "change_percent": change_percent,
            }
        ],
    }


def test_a_report_that_meets_the_requirements_has_no_failures() -> None:
    assert failed_requirements(make_report()) == []


def test_failures_name_value_and_requirement() -> None:
    failures = failed_requirements(make_report(correlation=float("nan"), change_percent=-3.0))

    assert len(failures) == 3
    assert "is nan, required >= 0.7" in failures[0]
    assert "batch 8 change by -3.0 %, required <= -12.0 %" in failures[2]


def test_report_covers_every_group_and_batch(
    trained_dir: Path, corpus_dir: Path, tmp_path: Path
) -> None:
    result = report(trained_dir, corpus_dir, tmp_path / "report.json", max_rows=32)

    assert json.loads((tmp_path / "report.json").read_text()) == result
    assert [row["group"] for row in result["loss"]] == list(GROUP_FIELDS)
    assert all(0 < row["loss"] < 10 for row in result["loss"])
    assert [(row["groups"], row["batch"]) for row in result["distinct_experts"]] == [
        (groups, batch)
        for groups in ("code/math/medical/legal", "en/zh/ru/fr")
        for batch in (8, 16, 32)
    ]
    lines = format_report(result).splitlines()
    table = lines[lines.index(next(line for line in lines if line.startswith("group "))) :][:10]
    assert len({len(line) for line in table}) == 1, "the columns of the loss table are aligned"


def test_report_refuses_a_corpus_with_too_few_rows(trained_dir: Path, tmp_path: Path) -> None:
    prompts_dir = write_corpus(tmp_path / "few", rows_per_group=5)

    with pytest.raises(ValueError, match="group 'code' has 5 answered test rows"):
        report(trained_dir, prompts_dir)


def test_report_refuses_a_folder_without_model(corpus_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"is not a model folder, it has no config\.json"):
        report(tmp_path, corpus_dir)


# --- command line ---------------------------------------------------------------------------------


def test_trace_holds_choices_and_logits_of_prompt_and_answer(
    trained_dir: Path, corpus_dir: Path, tokenizer: Any, tmp_path: Path
) -> None:
    written = write_trace(trained_dir, corpus_dir, tmp_path / "trace", max_rows=32)
    trace = load_trace(tmp_path / "trace")
    assert (len(trace), len(trace.ids_TLk)) == (written["requests"], written["tokens"])
    assert trace.logits_TLE is not None
    assert trace.prefix_tokens_N is not None
    chosen = np.sort(np.argsort(-trace.logits_TLE.astype(np.float32), axis=2)[:, :, :2], axis=2)
    # float16 makes a few near ties of logits exact.
    assert (chosen == np.sort(trace.ids_TLk, axis=2)).mean() > 0.99
    rows = [row for row in load_rows(corpus_dir, "test") if row.domain == "code"]
    lengths = [tuple(map(len, encode(tokenizer, row))) for row in rows]
    possible = {(len_prompt, len_prompt + len_answer - 1) for len_prompt, len_answer in lengths}
    of_code = np.flatnonzero(np.array(trace.domains) == "code")
    found = zip(trace.prefix_tokens_N[of_code], trace.num_tokens_N[of_code], strict=True)
    assert len(of_code) == 32
    assert set(found) <= possible
    use = ExpertUse.from_trace(trace, min_decode_tokens=1)
    assert use.gates == ALL_EXPERTS
    assert [path.name for path in tmp_path.iterdir()] == ["trace"]


def run_cli(*argv: object) -> int:
    parser = argparse.ArgumentParser()
    add_cli(parser.add_subparsers())
    args = parser.parse_args(["demo-model", *map(str, argv)])
    return int(args.func(args))


def test_unpack_command_prints_one_json_object(
    packed_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out_dir = tmp_path / "model"

    assert run_cli("unpack", "--packed", packed_dir, "--out", out_dir, "--json") == 0
    assert json.loads(capsys.readouterr().out) == {"out": str(out_dir), "written": True}
    assert run_cli("unpack", "--packed", packed_dir, "--out", out_dir) == 0
    assert capsys.readouterr().out == f"{out_dir}: up to date\n"


def test_wrong_input_is_one_line_and_status_two(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_cli("unpack", "--packed", tmp_path, "--out", tmp_path / "model") == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert "is not a packed model" in captured.err


def test_report_check_fails_for_a_model_without_structure(
    trained_dir: Path, corpus_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--model", trained_dir, "--prompts", corpus_dir, "--rows", 32, "--json")

    assert run_cli("report", *options) == 0
    assert run_cli("report", *options, "--check") == 1
    captured = capsys.readouterr()
    assert "requirement missed: distinct experts of code/math/medical/legal" in captured.err
    assert len(captured.out.splitlines()) == 2, "one JSON object a run"


def test_module_imports_without_torch_and_transformers() -> None:
    code = (
        "import sys; sys.modules.update(torch=None, transformers=None, safetensors=None)\n"
        "import argparse, calibration.demo_model as demo\n"
        "demo.add_cli(argparse.ArgumentParser().add_subparsers())\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=REPOSITORY)
