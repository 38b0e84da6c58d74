from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import re
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import numpy as np
import psutil
import pytest

from app import processes
from app.config import EldrConfig
from bench import capture, cli, peers, serving
from bench.load import Events, Job, LoadError, LoadProcess, Stream, run_job, tokens_per_s, tpot_ms
from bench.report import Spread, progress_line, ratios, stdout_to_stderr, table
from deployments.engine import Phase

TOKEN = b'data: {"choices":[{"text":"a","finish_reason":null}]}\n\n'
LAST_TOKEN = b'data: {"choices":[{"text":"a","finish_reason":"length"}]}\n\n'


@contextlib.asynccontextmanager
async def http_server(chunks, status=b"200 OK", pause_s=0.0):
    """A server that streams `chunks` as the answer to every request.

    Yields its URL and a list that its requests' bodies go to.
    """
    bodies = []

    async def serve(reader, writer):
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        bodies.append(json.loads(await reader.readexactly(length)))
        writer.write(b"HTTP/1.1 %s\r\ntransfer-encoding: chunked\r\n" % status)
        writer.write(b"connection: close\r\n\r\n")
        for chunk in [*chunks, b""]:
            writer.write(b"%x\r\n%s\r\n" % (len(chunk), chunk))
            await writer.drain()
            await asyncio.sleep(pause_s)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", bodies


def run_against(chunks, num_prompts=3, concurrency=3, tokens=4, **kwargs):
    async def go():
        async with http_server(chunks, **kwargs) as (url, bodies):
            prompts = [f"p{i}" for i in range(num_prompts)]
            return await run_job(Job(url, "m", prompts, tokens, concurrency)), bodies

    return asyncio.run(go())


class TestLoad:
    def test_asks_for_what_the_job_says(self):
        _, bodies = run_against([TOKEN, TOKEN, TOKEN, LAST_TOKEN])
        assert sorted(body["prompt"] for body in bodies) == ["p0", "p1", "p2"]
        assert {body["max_tokens"] for body in bodies} == {4}
        assert all(body["stream"] and body["ignore_eos"] for body in bodies)

    def test_times(self):
        streams, _ = run_against([TOKEN] * 3 + [LAST_TOKEN, b"data: [DONE]\n\n"], pause_s=0.02)
        for stream in streams:
            assert stream.events == stream.tokens == 4
            assert 0 < stream.ttft_s < 0.5
            # 3 pauses between the first and the last token; [DONE] is not a token.
            assert 0.018 < stream.tpot_s < 0.06

    def test_single_requests_follow_one_another(self):
        streams, _ = run_against([TOKEN, LAST_TOKEN], tokens=2, concurrency=1, pause_s=0.01)
        for before, after in itertools.pairwise(streams):
            assert after.started >= before.last

    def test_several_tokens_in_an_event_still_count(self):
        (stream,), _ = run_against([TOKEN, LAST_TOKEN], num_prompts=1, tokens=4)
        assert (stream.tokens, stream.events) == (4, 2)

    def test_refusal(self):
        with pytest.raises(LoadError, match=r"HTTP 429.*later"):
            run_against([b"later"], status=b"429 Too Many Requests")

    def test_short_stream(self):
        with pytest.raises(LoadError, match="after 2 events"):
            run_against([TOKEN, TOKEN])

    def test_nobody_listens(self):
        with pytest.raises(LoadError, match=r"127\.0\.0\.1"):
            asyncio.run(run_job(Job("http://127.0.0.1:9", "m", ["p"], 4, 1)))

    def test_process(self):
        async def go():
            async with http_server([TOKEN, LAST_TOKEN]) as (url, _):
                with LoadProcess() as generator:
                    job = Job(url, "m", ["a", "b"], 2, 2)
                    good = await asyncio.to_thread(generator.run, job)
                    bad = Job("http://127.0.0.1:9", "m", ["a"], 2, 1)
                    with pytest.raises(LoadError):
                        await asyncio.to_thread(generator.run, bad)
                    again = await asyncio.to_thread(generator.run, job)
                return good, again

        good, again = asyncio.run(go())
        assert [len(good), len(again)] == [2, 2]
        assert good[0].last > good[0].started


@pytest.mark.parametrize("size", [1, 2, 7, 50, 1000])
def test_events_may_be_split_anywhere(size):
    data = TOKEN * 5 + LAST_TOKEN + b"data: [DONE]\n\n"
    events = Events()
    assert sum(events.feed(data[i : i + size]) for i in range(0, len(data), size)) == 6
    assert events.is_complete


def test_load_statistics():
    streams = [Stream(0.0, 1.0, 4.0, 4, 4), Stream(1.0, 1.5, 5.0, 4, 4)]
    assert tokens_per_s(streams) == pytest.approx(8 / 5)
    assert tpot_ms(streams) == pytest.approx((1000 + 3500 / 3) / 2)
    assert streams[1].ttft_s == 0.5


class TestReport:
    def test_spread(self):
        assert Spread.of([3.0, 1.0, 2.0]) == Spread(2.0, 1.0, 3.0)
        with pytest.raises(ValueError, match="no rounds"):
            Spread.of([])

    def test_ratios_are_taken_round_by_round(self):
        # The second round was slow for both.
        assert ratios([10.0, 1.0, 10.0], [5.0, 0.5, 4.0]) == Spread(2.0, 2.0, 2.5)
        with pytest.raises(ValueError, match="argument"):
            ratios([1.0], [1.0, 2.0])

    def test_table_is_aligned(self):
        lines = table([["a", "bb", "c"], ["long", "1", "22"]]).splitlines()
        assert lines == ["a     bb   c", "long   1  22"]

    def test_progress_does_not_repeat_itself(self, capsys):
        tell = progress_line()
        for text in "aab":
            tell(text)
        assert capsys.readouterr().err == "a\nb\n"

    def test_stdout_is_for_the_report(self, capfd):
        with stdout_to_stderr():
            subprocess.run(["echo", "noise"], check=True)
            print("more noise")
        print("report")
        captured = capfd.readouterr()
        assert captured.out == "report\n"
        assert "noise\nmore noise\n" in captured.err


def sample(tokens_s, tpot=10.0, ttft=30.0):
    return serving.Sample(tokens_s, tpot, ttft, 300.0, 5.0, 32.0)


@pytest.fixture
def report():
    samples = {
        "ours": [sample(900.0), sample(1000.0, tpot=13.0), sample(800.0)],
        "stock": [sample(300.0), sample(400.0), sample(500.0)],
        "smg": [sample(1000.0), sample(1000.0), sample(1000.0)],
    }
    return serving.make_report(samples, 0.25, serving.Load(rounds=3))


class TestServing:
    def test_report(self, report):
        assert report["tokens_ratio_smg"] == 0.9
        assert report["tokens_ratio_stock"] == 2.5
        assert report["tpot_ratio_smg"] == report["ttft_ratio_smg"] == 1.0
        assert report["idle_cpu"] == 0.25
        assert (report["rounds"], report["seed"]) == (3, 0)
        assert report["systems"]["smg"]["ours_to_it"]["tokens_s"] == {
            "median": 0.9,
            "lo": 0.8,
            "hi": 1.0,
        }
        json.dumps(report)

    def test_text(self, report):
        text = serving.text_report({**report, "idle_cpu": 0.5})
        lines = text.splitlines()
        assert any("0.90 (0.80..1.00)" in line and line.endswith("ok") for line in lines)
        assert re.search(r"idle CPU of ours, cores +0\.50 +<= 0\.3 +missed", lines[-1])

    def test_order_changes_by_round_and_seed_alone(self):
        names = ["a", "b", "c"]
        orders = [serving.round_order(names, 0, i) for i in range(10)]
        assert orders == [serving.round_order(names, 0, i) for i in range(10)]
        assert orders != [serving.round_order(names, 1, i) for i in range(10)]
        assert len({tuple(order) for order in orders}) > 2
        assert all(sorted(order) == names for order in orders)

    def test_prompts_are_fresh_sized_and_repeatable(self):
        class Tokenizer:
            """Five characters a token."""

            def encode(self, text):
                ids = [text[i : i + 5] for i in range(0, len(text), 5)]
                return argparse.Namespace(ids=ids)

            def decode(self, ids):
                return "".join(ids)

        prompts = serving.make_prompts(Tokenizer(), 40, "0 round 1")
        assert prompts == serving.make_prompts(Tokenizer(), 40, "0 round 1")
        others = serving.make_prompts(Tokenizer(), 40, "0 round 2")
        assert len({prompt[:8] for prompt in prompts + others}) == 80
        assert all(len(prompt) <= 300 for prompt in prompts)

    def test_derived_application(self, config):
        derived = serving.derive(config, streams=100)
        assert derived.decode.num_replicas == 1
        assert derived.decode.max_num_seqs == 100
        assert (derived.router.policy, derived.router.artifact) == ("jsq", None)
        assert derived.limits.api_keys_env is None
        assert derived.decode.block_size == 64  # what is not about the bench stays
        EldrConfig.model_validate(derived.model_dump())

    def test_gpu_is_refused(self, config):
        with pytest.raises(ValueError, match="device: cpu"):
            serving.derive(config.model_copy(update={"device": "gpu"}), 32)

    def test_cpu_share_sees_the_processes_of_the_run(self):
        env = {**os.environ, processes.MARK: "bench-test"}
        with subprocess.Popen([sys.executable, "-c", "while True: pass"], env=env) as process:
            time.sleep(0.5)
            share = serving.cpu_share("bench-test", 1.0)
            rss = serving.rss_gib("bench-test")
            process.kill()
        assert 0.1 < share < 3.0
        assert rss > 0.01


@pytest.fixture
def config():
    return EldrConfig.model_validate(
        {
            "device": "cpu",
            "model": {"path": "/models/m", "served_name": "m"},
            "decode": {"num_replicas": 4, "block_size": 64},
            "router": {"policy": "band", "artifact": "/artifact"},
            "limits": {"api_keys_env": "KEYS"},
        }
    )


class TestPeers:
    def test_server_has_the_engine_of_ours(self, config):
        words = peers.server_command(serving.derive(config, 32), Phase.DECODE, 8100)
        assert words[words.index("--block-size") + 1] == "64"
        assert words[words.index("--max-num-seqs") + 1] == "64"
        transfer = json.loads(words[words.index("--kv-transfer-config") + 1])
        assert transfer["kv_connector"] == "EldrConnector"
        assert transfer["kv_role"] == "kv_consumer"
        assert transfer["kv_connector_extra_config"]["eldr_capture"] == "off"
        assert "--scheduler-cls" not in words

    def test_flags(self):
        kwargs = {"a_b": True, "c": False, "d": 3, "e": None, "f": {"g": [1]}}
        assert peers.flags(kwargs) == ["--a-b", "--no-c", "--d", "3", "--f", '{"g": [1]}']

    def test_ports_differ(self):
        assert len(set(peers.free_ports(5))) == 5

    def test_missing_smg(self, monkeypatch, capsys):
        monkeypatch.setattr(serving, "find_smg", lambda: None)
        assert command("serving") == 2
        assert "pip install 'eldr-serve[bench]'" in capsys.readouterr().err


class TestCapture:
    def test_report(self):
        rounds = [
            {"on": [1.02, 2.04, 9.0], "off": [1.0, 2.0, 1.0]},
            {"on": [1.0], "off": [1.0]},
            {"on": [1.1], "off": [1.0]},
        ]
        assert capture.make_report(rounds) == {
            "ratio_p50": 1.02,
            "ratio_lo": 1.0,
            "ratio_hi": 1.1,
            "on_ms": 1100.0,
            "off_ms": 1000.0,
        }

    def test_sides_alternate(self):
        assert [side for i in range(4) for side in capture.sides_in_order(i)] == [
            *("on", "off", "off", "on"),
            *("on", "off", "off", "on"),
        ]

    def test_prompts(self):
        prompts = capture.make_prompts(np.random.default_rng(0), 50, 100)
        assert {len(prompt) for prompt in prompts} <= set(range(300, 501))
        assert all(0 <= token < 50 for token in prompts[0])

    def test_missing_model(self, tmp_path: Path):
        with pytest.raises(ValueError, match="demo-model unpack"):
            command("capture", "--model", str(tmp_path))


def command(*words):
    parser = argparse.ArgumentParser()
    cli.add_cli(parser.add_subparsers())
    args = parser.parse_args(words)
    return args.func(args)


@pytest.fixture
def two_systems():
    """Two shells with a child each, as systems to stop: name to what lists its processes."""
    shells = [subprocess.Popen(["sh", "-c", "sleep 60 & wait"]) for _ in range(2)]
    roots = [psutil.Process(shell.pid) for shell in shells]
    while not all(root.children() for root in roots):
        time.sleep(0.01)
    yield {
        name: partial(processes.with_descendants, [root])
        for name, root in zip("ab", roots, strict=True)
    }
    for shell, root in zip(shells, roots, strict=True):
        for process in processes.with_descendants([root]):
            process.kill()
        shell.wait()


def _all_stopped(tree, expected):
    """Whether both processes come to stand still, or to go on: signals take a moment."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        members = tree()
        assert len(members) == 2
        if {p.status() == psutil.STATUS_STOPPED for p in members} == {expected}:
            return True
        time.sleep(0.01)
    return False


def test_systems_that_are_not_measured_stand_still_and_go_on(two_systems):
    def measure():
        with serving.stopped(two_systems, except_for="a"):
            assert _all_stopped(two_systems["b"], True)
            assert _all_stopped(two_systems["a"], False)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        measure()
    assert _all_stopped(two_systems["b"], False)
