"""The whole service on real engines, in the order of this file; the last tests break it."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import signal
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from app import processes
from app.config import load_config
from app.main import router_settings
from calibration.capture import Prompt
from tests.e2e.conftest import MAX_TOKENS, ROOT, Service, wait_until

MODEL = "eldr-demo"


def chat_body(text: str, **fields: Any) -> dict[str, Any]:
    return {
        "model": MODEL,
        "messages": [{"role": "user", "content": text}],
        "max_tokens": MAX_TOKENS,
        "temperature": 0,
        **fields,
    }


def post(service: Service, body: Any, path: str = "/v1/chat/completions", **headers: str) -> Any:
    return httpx.post(f"{service.url}{path}", json=body, headers=headers, timeout=120)


def events(response: httpx.Response) -> list[dict[str, Any]]:
    """The events of a streamed answer, which must end with [DONE]."""
    lines = [x.removeprefix("data: ") for x in response.text.splitlines() if x.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


# ---- tokens


def test_tokens_equal_those_of_one_engine(
    service: Service, prompts: list[Prompt], reference: dict[str, Any]
) -> None:
    assert len(prompts) >= 24
    different = {}
    for prompt in prompts:
        answer = post(service, chat_body(prompt.text, return_token_ids=True))
        assert answer.status_code == 200, answer.text
        tokens = answer.json()["choices"][0]["token_ids"]
        if tokens != reference[prompt.id]["token_ids"]:
            different[prompt.id] = (tokens, reference[prompt.id]["token_ids"])
    assert not different


def test_streamed_text_equals_that_of_one_engine(
    service: Service, prompts: list[Prompt], reference: dict[str, Any]
) -> None:
    different = {}
    for prompt in prompts:
        answer = post(service, chat_body(prompt.text, stream=True))
        assert answer.headers["content-type"].startswith("text/event-stream")
        text = "".join(e["choices"][0]["delta"].get("content") or "" for e in events(answer))
        if text != reference[prompt.id]["text"]:
            different[prompt.id] = (text, reference[prompt.id]["text"])
    assert not different


def test_stream_comes_in_pieces(service: Service) -> None:
    with httpx.stream(
        "POST",
        f"{service.url}/v1/chat/completions",
        json=chat_body("Count to ten.", stream=True, ignore_eos=True, max_tokens=40),
        timeout=60,
    ) as answer:
        times = [time.monotonic() for chunk in answer.iter_raw() if chunk]
    assert len(times) >= 20


# ---- what OpenAI clients ask for


def test_usage_counts_prompt_and_answer_once(service: Service) -> None:
    body = chat_body("Say hello.", ignore_eos=True, max_tokens=7)
    usage = post(service, body).json()["usage"]
    tokenized = post(service, {"model": MODEL, "messages": body["messages"]}, "/tokenize").json()
    assert usage["completion_tokens"] == 7
    assert usage["prompt_tokens"] == tokenized["count"]
    streamed = post(service, {**body, "stream": True, "stream_options": {"include_usage": True}})
    assert events(streamed)[-1]["usage"]["completion_tokens"] == 7


def test_completions_logprobs_stop_and_seed(service: Service) -> None:
    body = {"model": MODEL, "prompt": "def add(a, b):", "max_tokens": 12, "temperature": 0}
    body["ignore_eos"] = True
    plain = post(service, {**body, "logprobs": 2}, "/v1/completions").json()["choices"][0]
    assert len(plain["logprobs"]["tokens"]) == 12
    first = plain["logprobs"]["tokens"][0]
    stopped = post(service, {**body, "stop": [first]}, "/v1/completions").json()["choices"][0]
    assert stopped["finish_reason"] == "stop"
    assert stopped["text"] == ""
    sampled = {**body, "temperature": 1.0, "seed": 7}
    texts = {post(service, sampled, "/v1/completions").json()["choices"][0]["text"] for _ in "ab"}
    assert len(texts) == 1


def test_requests_without_kv_transfer_are_computed_by_decode(service: Service) -> None:
    answer = post(service, chat_body("Hi", n=2, temperature=1.0))
    assert answer.status_code == 200
    assert len(answer.json()["choices"]) == 2
    assert answer.headers["x-eldr-fallback"] == "n"
    many = {"model": MODEL, "prompt": ["one", "two"], "max_tokens": 3}
    answer = post(service, many, "/v1/completions")
    assert len(answer.json()["choices"]) == 2
    assert answer.headers["x-eldr-fallback"] == "multiple_prompts"


def test_tools_reach_the_prompt_of_both_engines(service: Service) -> None:
    tool = {
        "type": "function",
        "function": {"name": "get_time", "parameters": {"type": "object", "properties": {}}},
    }
    with_tools = chat_body("What time is it?", tools=[tool])
    answer = post(service, with_tools)
    assert answer.status_code == 200, answer.text
    assert "x-eldr-fallback" not in answer.headers
    plain = post(service, chat_body("What time is it?")).json()["usage"]["prompt_tokens"]
    assert answer.json()["usage"]["prompt_tokens"] > plain


def test_models_and_detokenize(service: Service) -> None:
    listed = httpx.get(f"{service.url}/v1/models").json()["data"]
    assert [m["id"] for m in listed] == [MODEL]
    assert httpx.get(f"{service.url}/v1/models/{MODEL}").status_code == 200
    assert httpx.get(f"{service.url}/v1/models/other").status_code == 404
    tokens = post(service, {"model": MODEL, "prompt": "héllo 世界"}, "/tokenize").json()["tokens"]
    text = post(service, {"model": MODEL, "tokens": tokens}, "/detokenize").json()["prompt"]
    assert text == "héllo 世界"


def test_openai_client_streams(service: Service) -> None:
    from openai import OpenAI

    client = OpenAI(base_url=f"{service.url}/v1", api_key="none", max_retries=0)
    stream = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "Hello"}],
        max_tokens=5,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True},
    )
    received = list(stream)  # several tokens may share an event
    assert len(received) >= 3
    assert received[-1].usage is not None
    assert received[-1].usage.completion_tokens == 5


def test_headers(service: Service) -> None:
    answer = post(service, chat_body("Hello"), **{"x-request-id": "my-id.1"})
    assert answer.headers["x-request-id"] == "my-id.1"
    assert answer.headers["x-eldr-policy"] == "live"
    assert -1 <= float(answer.headers["x-eldr-similarity"]) <= 1
    assert answer.headers["x-eldr-decode-replica"] in service.status()["loads"]
    assert len(post(service, chat_body("Hello")).headers["x-request-id"]) >= 32


# ---- routing


def replicas_of(service: Service, texts: list[str]) -> list[str]:
    return [post(service, chat_body(t)).headers["x-eldr-decode-replica"] for t in texts]


def test_prompts_of_one_domain_meet_when_idle(service: Service, prompts: list[Prompt]) -> None:
    homes = {}
    for label in ("zh", "ru", "commonsense"):
        texts = [p.text for p in prompts if p.label == label]
        homes[label] = set(replicas_of(service, texts))
    assert all(len(home) == 1 for home in homes.values()), homes
    assert len(set.union(*homes.values())) == 2, homes  # and not all domains at one


def test_burst_of_one_domain_spills_over(service: Service, prompts: list[Prompt]) -> None:
    text = next(p.text for p in prompts if p.label == "zh")
    bodies = [chat_body(f"{text} {i}", ignore_eos=True, max_tokens=64) for i in range(16)]
    with ThreadPoolExecutor(16) as executor:
        answers = list(executor.map(lambda body: post(service, body), bodies))
    homes = [a.headers["x-eldr-decode-replica"] for a in answers]
    assert all(a.status_code == 200 for a in answers)
    fewest = min(homes.count(home) for home in set(homes)) if len(set(homes)) == 2 else 0
    assert fewest >= 4, homes
    wait_until(lambda: not any(service.status()["loads"].values()), 10, "loads back at 0")


def test_policy_decides(service: Service, prompts: list[Prompt]) -> None:
    """Under round robin, prompts of one domain alternate; under `live` they meet again."""
    texts = [p.text for p in prompts if p.label == "zh"] * 2
    settings = router_settings(load_config(ROOT / "examples" / "demo.yaml"))
    with router_actor() as actor:
        actor("configure", dataclasses.replace(settings, policy="rr"))
        assert len(set(replicas_of(service, texts))) == 2
        actor("configure", settings)
        assert len(set(replicas_of(service, texts))) == 1


@contextlib.contextmanager
def router_actor() -> Iterator[Any]:
    """Calls methods of the running service's router actor."""
    import ray

    from router.actor import forget_handle, router_handle

    ray.init(address="auto", logging_level="ERROR", log_to_driver=False)
    try:
        yield lambda name, *args: ray.get(getattr(router_handle("eldr"), name).remote(*args))
    finally:
        forget_handle("eldr")
        ray.shutdown()


# ---- bad input


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("chat/completions", chat_body("x", model="other"), 404, "model"),
        ("chat/completions", {**chat_body("x"), "messages": []}, 400, "messages"),
        ("chat/completions", chat_body("x", max_tokens=0), 400, "max_tokens"),
        ("chat/completions", chat_body("x", max_tokens=-3), 400, "max_tokens"),
        ("chat/completions", chat_body("x", n=99), 400, "n"),
        ("chat/completions", chat_body("long " * 6000), 400, "input_tokens"),
        ("chat/completions", chat_body("x", kv_transfer_params={}), 400, "kv_transfer_params"),
        ("completions", {"model": MODEL, "prompt": ""}, 400, "prompt"),
        ("completions", {"model": MODEL}, 400, "prompt"),
    ],
)
def test_bad_requests_name_the_field(
    service: Service, path: str, body: Any, status: int, param: str
) -> None:
    answer = post(service, body, f"/v1/{path}")
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert error["param"] == param
    assert error["message"]
    assert answer.headers["x-request-id"]


@pytest.mark.parametrize(
    ("raw", "status"),
    [(b'{"model": ', 400), (b'{"model": "\xff\xfe"}', 400), (b"[]", 400), (b"x" * 300_000, 413)],
)
def test_bad_bodies(service: Service, raw: bytes, status: int) -> None:
    answer = httpx.post(f"{service.url}/v1/chat/completions", content=raw, timeout=30)
    assert answer.status_code == status
    assert answer.json()["error"]["param"] == "body"


def test_decode_replicas_answer_the_ingress_alone(service: Service) -> None:
    url = next(iter(service.status()["replicas"]["decode"].values()))
    assert httpx.post(f"{url}/v1/chat/completions", json=chat_body("x")).status_code == 403
    assert httpx.get(f"{url}/metrics").status_code == 403


# ---- things break


def test_client_that_goes_away_frees_its_slot(service: Service) -> None:
    body = json.dumps(chat_body("Tell a story.", stream=True, ignore_eos=True, max_tokens=1500))
    host, port = service.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as client:
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}"
        client.sendall(f"{head}\r\n\r\n{body}".encode())
        client.recv(4096)
        assert any(service.status()["loads"].values())
    wait_until(lambda: not any(service.status()["loads"].values()), 10, "slot released")


def test_router_crash_is_survived_and_healed(service: Service, prompts: list[Prompt]) -> None:
    before = service.status()
    os.kill(before["pid"], signal.SIGKILL)
    answer = post(service, chat_body("Hello"))
    assert answer.status_code == 200
    assert answer.headers.get("x-eldr-fallback") in (None, "router_away")

    def is_back() -> bool:
        try:
            status = service.status()
        except OSError:
            return False
        return bool(status["pid"] != before["pid"] and len(status["loads"]) == 2)

    wait_until(is_back, 30, "router back with both replicas")
    assert service.status()["assignment"] == before["assignment"]
    assert "x-eldr-fallback" not in post(service, chat_body(prompts[0].text)).headers


def test_dead_decode_replica_is_left_out_and_replaced(service: Service) -> None:
    text = "Write a function."
    assert service.ready() == {"prefill": 1, "decode": 2}
    home = post(service, chat_body(text)).headers["x-eldr-decode-replica"]
    os.kill(service.pid_of_decode(home), signal.SIGKILL)
    for _ in range(4):
        answer = post(service, chat_body(text))
        assert answer.status_code == 200, answer.text
        assert answer.headers["x-eldr-decode-replica"] != home
    wait_until(lambda: service.ready()["decode"] == 2, 180, "a new decode replica")
    assert home not in service.status()["loads"]
    assert post(service, chat_body(text)).status_code == 200
    # Its gauges end with it; its counters stay.
    gauge = f'ray_eldr_replica_requests{{.*replica="{home}"'
    wait_until(
        lambda: not re.search(gauge, httpx.get(service.metrics_url).text),
        60,
        "Ray forgets the gauges of a dead replica",
    )


def test_hard_kill_leaves_no_process_behind(service: Service) -> None:
    family = processes.find(service.run_id)
    assert len(family) > 10
    service.process.kill()
    service.process.wait()
    wait_until(lambda: not any(p.is_running() for p in family), 40, "every process ended")
    assert not processes.find(service.run_id)
