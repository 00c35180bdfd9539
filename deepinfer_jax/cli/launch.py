"""Start one process of a deployment: its router, or an engine of a role.

deepinfer-jax launch router --listen 127.0.0.1:9510
deepinfer-jax launch prompt --model demo --router 127.0.0.1:9510
deepinfer-jax launch completion --model demo --router 127.0.0.1:9510
deepinfer-jax launch ROLE --help
"""

from __future__ import annotations

import argparse
import importlib

ROLES = ("router", "prompt", "completion", "normal")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("role", choices=ROLES, help="what this process is")
    parser.add_argument(
        "flags", nargs=argparse.REMAINDER, metavar="...", help="the role's own flags"
    )


def run(args: argparse.Namespace) -> int:
    return importlib.import_module(f"deepinfer_jax.launch.{args.role}").main(args.flags)
