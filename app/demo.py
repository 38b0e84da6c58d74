"""What `eldr demo` shows: where requests of several domains go, and how fast they are."""

from __future__ import annotations

import sys
import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

from app.config import EldrConfig

DOMAINS = ("code", "math", "medical", "legal", "en", "zh", "ru", "fr")


@dataclass(frozen=True, slots=True)
class Shown:
    """One finished request."""

    domain: str
    replica: str
    similarity: str
    fallback: str
    ttft_s: float
    tpot_s: float
    num_tokens: int


def run_demo(
    url: str, config: EldrConfig, prompts_dir: str, per_domain: int, max_tokens: int
) -> list[Shown]:
    """Stream one answer to the terminal, then send requests of all domains and print a table."""
    from openai import OpenAI

    from calibration.capture import Prompt, read_prompts, sample

    client = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    model = config.model.served_name
    prompts: list[Prompt] = []
    pool = [p for p in read_prompts(prompts_dir, "test") if len(p.text) < 1500]
    for domain in DOMAINS:
        prompts += sample([p for p in pool if p.label == domain], per_domain, seed=0)

    print("\n> Write a Python function that adds two numbers.\n", flush=True)
    stream_to(sys.stdout, client, model, "Write a Python function that adds two numbers.")
    print(
        "\n\nrequests of eight domains, one at a time (with a few in flight, load would decide):\n"
    )
    print(_row("domain", "decode replica", "similarity", "TTFT ms", "TPOT ms", "tokens", ""))
    shown: list[Shown] = []
    for prompt in prompts:
        one = ask(client, model, prompt, max_tokens)
        shown.append(one)
        print(
            _row(
                one.domain,
                one.replica,
                one.similarity,
                f"{one.ttft_s * 1e3:.0f}",
                f"{one.tpot_s * 1e3:.1f}",
                str(one.num_tokens),
                f"fallback: {one.fallback}" if one.fallback else "",
            ),
            flush=True,
        )
    _print_homes(shown, config.router.policy)
    return shown


def stream_to(out: Any, client: Any, model: str, text: str) -> None:
    """Stream one chat answer, token by token."""
    stream = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": text}],
        max_tokens=80,
        temperature=0,
        stream=True,
    )
    for event in stream:
        if event.choices and event.choices[0].delta.content:
            out.write(event.choices[0].delta.content)
            out.flush()


def ask(client: Any, model: str, prompt: Any, max_tokens: int) -> Shown:
    """Send one chat request; time its tokens."""
    begin = time.perf_counter()
    raw = client.chat.completions.with_raw_response.create(
        model=model,
        messages=[{"role": "user", "content": prompt.text}],
        max_tokens=max_tokens,
        temperature=0,
        stream=True,
        extra_body={"ignore_eos": True},
        extra_headers={"x-eldr-domain": prompt.label},
    )
    times = [time.perf_counter() for event in raw.parse() if event.choices]
    first, last = times[0], times[-1]
    headers = raw.headers
    return Shown(
        domain=prompt.label,
        replica=headers["x-eldr-decode-replica"],
        similarity=headers.get("x-eldr-similarity", "-"),
        fallback=headers.get("x-eldr-fallback", ""),
        ttft_s=first - begin,
        tpot_s=(last - first) / max(1, len(times) - 1),
        num_tokens=len(times),
    )


def _print_homes(shown: list[Shown], policy: str) -> None:
    """How the requests of each domain spread over the decode replicas."""
    replicas = sorted({one.replica for one in shown})
    counts = Counter((one.domain, one.replica) for one in shown)
    print(f"\nrequests by domain and decode replica (policy {policy}):\n")
    print(f"{'':<10}" + "".join(f"{replica:>12}" for replica in replicas))
    for domain in DOMAINS:
        print(f"{domain:<10}" + "".join(f"{counts[domain, r]:>12}" for r in replicas))
    print()


def _row(*cells: str) -> str:
    widths = (10, 16, 11, 9, 9, 8, 0)
    return "".join(
        cell.ljust(w) if i < 2 else cell.rjust(w) if w else f"  {cell}"
        for i, (cell, w) in enumerate(zip(cells, widths, strict=True))
    )
