"""`python -m calibration.demo_model`: the demo-model commands without the `eldr` wrapper."""

from __future__ import annotations

import argparse
import sys

from calibration.demo_model.cli import add_commands


def main(argv: list[str] | None = None) -> int:
    """Parse the arguments, run the command and return its exit status."""
    parser = argparse.ArgumentParser(prog="python -m calibration.demo_model", description=__doc__)
    add_commands(parser)
    args = parser.parse_args(argv)
    return int(args.func(args))


if __name__ == "__main__":
    sys.exit(main())
