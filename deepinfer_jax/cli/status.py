"""Show what a deployment's router knows: engines, requests, counters.

deepinfer-jax status --router 127.0.0.1:9510
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

from deepinfer_jax import json_text

COLUMNS = (
    ("name", "ENGINE"),
    ("role", "ROLE"),
    ("state", "STATE"),
    ("mesh", "MESH"),
    ("waiting", "WAIT"),
    ("running", "RUN"),
    ("cache", "CACHE"),
    ("hand_overs", "MOVING"),
    ("routed_requests", "ROUTED"),
    ("steps", "STEPS"),
    ("seen", "SEEN"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--router",
        default="127.0.0.1:9510",
        metavar="HOST:PORT",
        help="the router (default: 127.0.0.1:9510)",
    )
    parser.add_argument("--secret-file", metavar="FILE", help="the deployment's shared secret")
    parser.add_argument(
        "--timeout",
        type=float,
        default=10.0,
        metavar="SECONDS",
        help="how long to wait for the router (default: 10)",
    )
    parser.add_argument("--json", action="store_true", help="print everything as one JSON object")


def run(args: argparse.Namespace) -> int:
    """0 while the deployment is healthy, 1 otherwise."""
    from deepinfer_jax.rpc.client import RouterConnection, ask_status

    connection = RouterConnection(args.router, args.secret_file)
    connection.connect(args.timeout, need_model=False)
    try:
        status = ask_status(connection, args.timeout)
    finally:
        connection.close()
    sys.stdout.write(json_text.dumps(status, indent=1) + "\n" if args.json else as_text(status))
    return 0 if status["health"]["status"] == "ok" else 1


def as_text(status: dict[str, Any]) -> str:
    """A table of engines, then what is wrong, then counters."""
    rows = [
        [title for _, title in COLUMNS],
        *([_cell(e, key) for key, _ in COLUMNS] for e in status["engines"]),
    ]
    widths = [max(len(row[i]) for row in rows) for i in range(len(COLUMNS))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    lines += [
        f"gone: {g['name']} ({g['role'] if 'role' in g else g['kind']},"
        f" {time.time() - g['time']:.0f} s ago): {g['reason']}"
        for g in status["gone"][-5:]
    ]
    lines.append(
        f"requests {status['requests']}, queued {status['queued']}, clients {status['clients']}"
    )
    lines.append(
        "counters: " + ", ".join(f"{k} {v}" for k, v in sorted(status["counters"].items()) if v)
    )
    problems = status["health"]["problems"]
    lines.append("healthy" if not problems else "unhealthy: " + "; ".join(problems))
    return "\n".join(lines) + "\n"


def _cell(engine: dict[str, Any], key: str) -> str:
    value = engine.get(key, "")
    match key:
        case "mesh":
            return " ".join(f"{k}{v}" for k, v in value.items()) if value else ""
        case "cache":
            return f"{value:.0%}" if value != "" else ""
        case "seen":
            return f"{value:.1f} s"
    return f"{value:g}" if isinstance(value, float) else str(value)
