"""Replay on small hand-made traces, where every figure can be worked out."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from app.cli import main
from calibration.replay import (
    Arrivals,
    Replay,
    Workload,
    expert_bits,
    replica_name,
    resident_steps,
    unpack_bits,
)
from calibration.replay_report import Settings, interval, reference, run, run_one, summary
from calibration.step_time import StepTimeLaw
from calibration.traces import RoutingTrace, expert_counts, load_trace
from router.core import RoutingCore
from router.policy import make_policy

NUM_EXPERTS = 16
PREFIX = 4
ROOT = Path(__file__).parents[3]


def two_groups(num_requests: int = 40, num_tokens: int = 20, seed: int = 0) -> RoutingTrace:
    """Requests of group r % 2, which use experts 0-7 or 8-15; 3 layers, top-2."""
    rng = np.random.default_rng(seed)
    parts = [
        np.stack([rng.permutation(8)[:2] + 8 * (r % 2) for _ in range(num_tokens * 3)]).reshape(
            num_tokens, 3, 2
        )
        for r in range(num_requests)
    ]
    return RoutingTrace(
        np.concatenate(parts).astype(np.uint8),
        np.arange(num_requests + 1) * num_tokens,
        NUM_EXPERTS,
        tuple("ab"[r % 2] for r in range(num_requests)),
    )


@pytest.fixture(scope="module")
def workload() -> Workload:
    return Workload.split(two_groups(), PREFIX, seed=0)


class TestBits:
    @pytest.mark.parametrize("num_experts", [16, 64, 65, 200])
    def test_union_of_bits_is_the_set_of_ids(self, num_experts: int) -> None:
        rng = np.random.default_rng(1)
        ids = np.stack([rng.permutation(num_experts)[:4] for _ in range(12)]).reshape(6, 2, 4)
        bits = expert_bits(ids.astype(np.uint8), num_experts)
        union = unpack_bits(np.bitwise_or.reduce(bits, axis=0), num_experts)
        for layer in range(2):
            assert set(np.flatnonzero(union[layer])) == set(ids[:, layer].ravel().tolist())


class TestWorkload:
    def test_halves_are_disjoint_and_complete(self, workload: Workload) -> None:
        both = np.concatenate([workload.calibration, workload.served])
        assert sorted(both.tolist()) == list(range(40))

    def test_capture_counts_prefix_and_rest(self, workload: Workload) -> None:
        capture = workload.capture()
        request = int(workload.calibration[3])
        tokens = workload.trace.tokens(request)
        np.testing.assert_array_equal(
            capture.prefill_counts_NLE[3], expert_counts(tokens[:PREFIX], NUM_EXPERTS)
        )
        np.testing.assert_array_equal(
            capture.decode_counts_NLE[3], expert_counts(tokens[PREFIX:], NUM_EXPERTS)
        )

    @pytest.mark.parametrize(
        ("prefix", "minimum", "text"),
        [(0, None, "prefix_tokens"), (4, 4, "min_tokens"), (15, None, "no request has 30")],
    )
    def test_bad_cuts_are_refused(self, prefix: int, minimum: int | None, text: str) -> None:
        with pytest.raises(ValueError, match=text):
            Workload.split(two_groups(), prefix, 0, minimum)


class TestReplay:
    def replay(self, workload: Workload, policy: str, **kwargs: object) -> Replay:
        artifact = workload.fit(2, 0)
        core = RoutingCore(make_policy(policy, seed=0), artifact, 0)
        defaults: dict[str, object] = {
            "num_replicas": 2,
            "arrivals": Arrivals("closed", 8),
            "num_requests": 60,
            "num_warmup": 16,
        }
        return Replay(workload, core, **{**defaults, **kwargs})  # type: ignore[arg-type]

    def test_closed_loop_keeps_the_number_in_flight(self, workload: Workload) -> None:
        figures = self.replay(workload, "jsq").run().figures()
        assert figures["max_batch"] == 4
        assert figures["mean_batch"] == pytest.approx(4, abs=0.2)

    @pytest.mark.parametrize("policy", ["band", "soft", "live"])
    def test_locality_keeps_groups_apart(self, workload: Workload, policy: str) -> None:
        arrivals = Arrivals("closed", 24)
        jsq = self.replay(workload, "jsq", arrivals=arrivals).run().figures()
        ours = self.replay(workload, policy, arrivals=arrivals).run().figures()
        assert ours["distinct"] < 0.8 * jsq["distinct"]

    def test_tpot_is_the_mean_step_time(self, workload: Workload) -> None:
        law = StepTimeLaw(2.0, 0.0, 0.0)
        result = self.replay(workload, "jsq", law=law).run()
        np.testing.assert_allclose(result.tpot_M, 2.0)

    def test_distinct_of_one_request_is_top_k(self, workload: Workload) -> None:
        arrivals = Arrivals("closed", 1)
        figures = self.replay(workload, "rr", arrivals=arrivals, num_requests=5).run().figures()
        assert figures["distinct"] == 2.0

    def test_same_seed_same_result(self, workload: Workload) -> None:
        first = self.replay(workload, "live", seed=3).run()
        second = self.replay(workload, "live", seed=3).run()
        np.testing.assert_array_equal(first.tpot_M, second.tpot_M)

    def test_every_reservation_is_released(self, workload: Workload) -> None:
        replay = self.replay(workload, "live")
        replay.run()
        core = replay.core
        core.ledger.check_integrity()
        assert len(core.ledger) <= 8
        assert core.counters["unknown_releases"] == 0

    @pytest.mark.parametrize("kind", ["poisson", "bursty"])
    def test_open_loops_bring_the_load_that_littles_law_says(
        self, workload: Workload, kind: str
    ) -> None:
        law = StepTimeLaw(1.0, 0.0, 0.0)  # 16 decode tokens: every request stays 16 to 17 units
        arrivals = Arrivals(kind, 8, rate=0.5)
        result = self.replay(workload, "rr", arrivals=arrivals, law=law, num_requests=1500).run()
        assert len(result.tpot_M) / result.duration == pytest.approx(0.5, rel=0.15)
        in_flight = result.step_batch_S.sum() / result.duration
        assert in_flight == pytest.approx(0.5 * 16, rel=0.15)

    def test_observer_sees_the_union_and_prices_loads(self, workload: Workload) -> None:
        class Watch:
            def __init__(self) -> None:
                self.unions: list[int] = []

            def on_step(self, replica: int, union_LE: np.ndarray, num_requests: int) -> float:
                assert union_LE.shape == (3, NUM_EXPERTS)
                self.unions.append(int(union_LE.sum()))
                return 1.5

        watch = Watch()
        result = self.replay(workload, "jsq", observer=watch).run()
        assert set(result.step_loads_S) == {1.5}
        assert max(watch.unions) <= 3 * NUM_EXPERTS
        assert round(result.step_distinct_S.max() * 3) in watch.unions

    def test_the_core_hears_now_and_then_what_caches_hold(self, workload: Workload) -> None:
        class Watch:
            def __init__(self) -> None:
                self.steps = [0, 0]
                self.asked: list[list[int]] = [[], []]

            def on_step(self, replica: int, union_LE: np.ndarray, num_requests: int) -> float:
                self.steps[replica] += 1
                return 0.0

            def resident(self, replica: int) -> np.ndarray:
                self.asked[replica].append(self.steps[replica])
                return np.ones((3, NUM_EXPERTS), dtype=np.bool_)

        watch = Watch()
        self.replay(workload, "live", observer=watch, residents=watch.resident).run()
        for steps, asked in zip(watch.steps, watch.asked, strict=True):
            assert steps > resident_steps(2) == 10
            assert asked == list(range(1, steps + 1, 10))

    def test_scenario_may_add_and_remove_replicas(self, workload: Workload) -> None:
        def scenario(number: int, now: float, core: RoutingCore) -> None:
            if number == 40:
                core.set_replicas([replica_name(k) for k in range(4)])
            elif number == 70:
                core.set_replicas([replica_name(k) for k in (1, 2, 3)])

        result = self.replay(workload, "jsq", scenario=scenario, num_requests=120).run()
        assert set(result.replica_M[:10]) == {0, 1}
        assert set(result.replica_M[-20:]) == {1, 2, 3}

    def test_bad_arguments_are_refused(self, workload: Workload) -> None:
        with pytest.raises(ValueError, match="replica"):
            self.replay(workload, "jsq", num_replicas=0)
        with pytest.raises(ValueError, match="arrivals must be"):
            Arrivals("slow", 8)
        with pytest.raises(ValueError, match="rate"):
            Arrivals("poisson", 8)


class TestKnownPrompts:
    def test_each_request_is_cut_at_its_own_prompt(self) -> None:
        trace = two_groups()
        prompts = np.arange(40) % 3 + 1
        known = RoutingTrace(
            trace.ids_TLk, trace.offsets, NUM_EXPERTS, trace.domains, prefix_tokens_N=prompts
        )
        workload = Workload.split(known, None, 0)
        assert workload.counts_NLE[:, 0].sum(axis=1).tolist() == (2 * prompts).tolist()
        core = RoutingCore(make_policy("live"), workload.fit(2, 0), 0)
        arrivals = Arrivals("closed", 4)
        Replay(workload, core, num_replicas=2, arrivals=arrivals, num_requests=20).run()
        assert not [name for name in core.counters if name.startswith("fallback")]

    def test_a_trace_without_prompts_needs_a_prefix(self) -> None:
        with pytest.raises(ValueError, match="give prefix_tokens"):
            Workload.split(two_groups(), None, 0)


class TestReport:
    def test_reference_is_the_balancer_with_the_lowest_median(self) -> None:
        figures = {
            name: {"tpot_p50": [value]}
            for name, value in (("rr", 2.0), ("jsq", 1.0), ("band", 0.5))
        }
        assert reference(figures) == "jsq"

    def test_interval_is_students(self) -> None:
        low, high = interval([1.0, 2.0, 3.0])
        assert (low, high) == pytest.approx((2 - 2.4841, 2 + 2.4841), abs=1e-3)
        assert np.isnan(interval([1.0])).all()

    def test_policies_see_the_same_requests(self) -> None:
        settings = Settings(["jsq", "band"], 2, Arrivals("closed", 8), PREFIX, None, (0, 1), 40, 16)
        report = summary(run(two_groups(), settings), settings)
        assert report["reference"] == "jsq"
        assert report["policies"]["jsq"]["ratio"]["distinct"]["mean"] == 1.0
        assert report["policies"]["band"]["ratio"]["distinct"]["mean"] < 0.9
        json.dumps(report, allow_nan=False)

    def test_domain_oracle_gets_its_map(self) -> None:
        settings = Settings(["domain"], 2, Arrivals("closed", 8), PREFIX, None, (0,), 40, 16)
        workload = Workload.split(two_groups(), PREFIX, 0)
        result = run_one(workload, workload.fit(2, 0), settings, "domain", 0)
        assert result.figures()["distinct"] < 8.1


class TestCommand:
    def write(self, folder: Path, trace: RoutingTrace) -> Path:
        path = folder / "trace.npz"
        np.savez(path, ids=trace.ids_TLk.transpose(1, 2, 0), offsets=trace.offsets)
        return path

    def test_json_has_what_it_promises(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        path = self.write(tmp_path, two_groups())
        meta = tmp_path / "meta.jsonl"
        meta.write_text("".join(json.dumps({"domain": "ab"[r % 2]}) + "\n" for r in range(40)))
        status = main(
            ["replay", "--ids", str(path), "--meta", str(meta), "--replicas", "2",
             "--concurrency", "8", "--prefix-tokens", "4", "--seeds", "2", "--requests", "40",
             "--policies", "jsq,rr,p2c,random,domain,band,soft,live", "--json"]
        )  # fmt: skip
        assert status == 0
        report = json.loads(capsys.readouterr().out)
        assert report["reference"] in ("jsq", "rr", "p2c", "random")
        for row in report["policies"].values():
            low, high = row["distinct_ci"]
            assert low <= row["distinct"] <= high
            assert 0 < row["tpot_p50"] <= row["tpot_p99"]
            assert row["max_batch"] >= 4

    @pytest.mark.parametrize(
        ("extra", "text"),
        [
            (["--policies", "nearest"], "unknown routing policy 'nearest'"),
            (["--replicas", "0"], "--replicas"),
            (["--replicas", "30"], "30 clusters"),
            (["--prefix-tokens", "15"], "no request has 30 tokens"),
            (["--experts", "4"], r"outside \[0, 4\)"),
            (["--seeds", "0"], "seed"),
            (["--tau", "2"], "tau"),
        ],
    )
    def test_bad_input_is_one_clear_line(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str], extra: list[str], text: str
    ) -> None:
        path = self.write(tmp_path, two_groups())
        args = ["replay", "--ids", str(path), "--concurrency", "8", "--prefix-tokens", "4"]
        assert main([*args, *extra]) == 2
        error = capsys.readouterr().err
        assert "Traceback" not in error
        assert re.search(text, error), error


class TestFindings:
    """What replay of the recorded GPT-OSS-20B requests is known to show."""

    @pytest.fixture(scope="class")
    def gpt_oss(self) -> RoutingTrace:
        folder = ROOT / "data" / "traces"
        return load_trace(
            folder / "gptoss20b_requests_ids.npz", folder / "gptoss20b_requests_meta.jsonl"
        )

    def test_locality_saves_experts_and_live_keeps_the_tail(self, gpt_oss: RoutingTrace) -> None:
        settings = Settings(["jsq", "band", "live"], 8, seeds=(0,), num_requests=256)
        report = summary(run(gpt_oss, settings), settings)["policies"]
        assert report["jsq"]["distinct"] == pytest.approx(23.0, abs=0.3)
        band, live = report["band"]["ratio"], report["live"]["ratio"]
        assert band["distinct"]["mean"] < 0.93
        assert live["distinct"]["mean"] < 0.92
        assert live["tpot_p99"]["mean"] < band["tpot_p99"]["mean"]
        assert live["tpot_p99"]["mean"] < 1.01
