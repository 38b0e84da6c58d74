"""`eldr calibrate capture`."""

from __future__ import annotations

import argparse
import asyncio
import sys


def add_cli(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the command below `eldr calibrate`."""
    parser = subparsers.add_parser(
        "capture", help="run prompts through a real engine and store expert counts"
    )
    parser.add_argument("config", help="configuration file; its prefill section is the engine")
    parser.add_argument("--prompts", required=True, help="a .jsonl file, or a folder of them")
    parser.add_argument("--split", help="only rows whose `split` is this")
    parser.add_argument("--num", type=int, default=1000, help="prompts, evenly over the labels")
    parser.add_argument("--max-tokens", type=int, default=64, help="longest answer, tokens")
    parser.add_argument("--concurrency", type=int, default=16, help="requests at once")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", required=True, help="folder to write")
    parser.set_defaults(func=_capture)


def _capture(args: argparse.Namespace) -> int:
    from tqdm import tqdm

    from app.config import load_config
    from calibration.capture import capture, read_prompts, sample

    config = load_config(args.config)
    prompts = sample(read_prompts(args.prompts, args.split), args.num, args.seed)
    print(f"capturing {len(prompts)} prompts; the engine starts", file=sys.stderr)
    with tqdm(total=len(prompts), desc="capture", unit="request") as bar:
        result = asyncio.run(
            capture(
                config,
                prompts,
                max_tokens=args.max_tokens,
                concurrency=args.concurrency,
                on_done=lambda: bar.update(1),
            )
        )
    result.save(args.out)
    print(f"{len(result)} requests in {args.out}; fit with: eldr calibrate fit {args.out} --k K")
    return 0
