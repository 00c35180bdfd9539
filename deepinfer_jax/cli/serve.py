"""Serve a model over HTTP with the OpenAI API.

  deepinfer-jax serve --model demo --port 8000
  deepinfer-jax serve --model demo --disaggregate 1P:1D
  deepinfer-jax serve --router HOST:PORT --model FOLDER_OF_TOKENIZER

Binds 127.0.0.1 unless --host says otherwise. Needs the extra `server`.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deepinfer_jax.cli import common
from deepinfer_jax.flags import add_model_flag
from deepinfer_jax.rpc.security import read_secret_file

if TYPE_CHECKING:
    from deepinfer_jax.llm import LLM

MISSING = "`deepinfer-jax serve` needs fastapi and uvicorn: pip install 'deepinfer-jax[server]'"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_flag(parser, required=False)
    group = parser.add_argument_group("server")
    group.add_argument("--host", default="127.0.0.1", help="address to listen on")
    group.add_argument("--port", type=int, default=8000, help="0: any free port")
    group.add_argument("--router", metavar="HOST:PORT", help="serve a deployment's router")
    group.add_argument("--secret-file", metavar="FILE", help="the deployment's secret")
    group.add_argument("--disaggregate", metavar="nP:mD", help="prefill and decode apart, here")
    group.add_argument("--api-key-file", metavar="FILE", help="keys, separated by white space")
    group.add_argument("--allowed-origin", action="append", default=[], metavar="ORIGIN")
    group.add_argument(
        "--max-requests", type=int, default=4096, help="unfinished completions at a time"
    )
    group.add_argument("--max-body-bytes", type=int, default=8 << 20)
    group.add_argument("--drain-seconds", type=float, default=30.0, help="time to end at SIGTERM")
    group.add_argument(
        "--tool-parser", default="auto", choices=["auto", "hermes", "llama3", "deepseek"]
    )
    group.add_argument("--reasoning-parser", default="auto", choices=["auto", "think", "none"])
    common.add_engine_flags(parser)


def run(args: argparse.Namespace) -> int:
    try:
        import uvicorn

        from deepinfer_jax.serve.app import create_app
        from deepinfer_jax.serve.context import ServerOptions
    except ImportError as error:
        raise ValueError(f"{MISSING} ({error})") from error
    options = ServerOptions(
        max_body=args.max_body_bytes,
        max_requests=args.max_requests,
        api_keys=_keys(args.api_key_file),
        allowed_origins=tuple(args.allowed_origin),
        tool_parser=args.tool_parser,
        reasoning_parser=args.reasoning_parser,
        drain_seconds=args.drain_seconds,
    )
    with _build(args) as llm:
        name = getattr(args, "served_model_name", None) or Path(_model_of(args, llm.engine)).name
        app = create_app(llm.engine, name, options)
        config = uvicorn.Config(
            app,
            host=args.host,
            port=args.port,
            log_level="warning",
            timeout_graceful_shutdown=int(args.drain_seconds) + 1,
            timeout_keep_alive=30,
        )
        with config.bind_socket() as listener:
            listener.listen(config.backlog)  # who reads the next line may connect
            host, port = listener.getsockname()[:2]
            shown = f"[{host}]" if ":" in host else host
            print(f"serving {name} on http://{shown}:{port}", file=sys.stderr, flush=True)
            uvicorn.Server(config).run(sockets=[listener])
    return 0


def _build(args: argparse.Namespace) -> LLM:
    from deepinfer_jax.llm import LLM

    if args.router is None:
        if args.secret_file is not None:
            raise ValueError("--secret-file is the deployment's: it needs --router")
        if args.model is None:
            raise ValueError("give --model, or the --router of a deployment")
        more = {} if args.disaggregate is None else {"disaggregate": args.disaggregate}
        return common.build_llm(args, **more)
    given = [name for name in common.engine_values(args) if name != "served_model_name"]
    given += ["disaggregate"] if args.disaggregate is not None else []
    if given:
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        raise ValueError(f"with --router the engines have their own arguments; got {flags}")
    options = {} if args.secret_file is None else {"secret": args.secret_file}
    return LLM(args.model, router=args.router, router_options=options)


def _model_of(args: argparse.Namespace, engine: Any) -> str:
    return str(args.model if args.model is not None else engine.info.model)


def _keys(file: str | None) -> frozenset[str]:
    """One key per line. ValueError for a file that others may read."""
    if file is None:
        return frozenset()
    keys = read_secret_file(file).decode().split()
    if not keys:
        raise ValueError(f"{file}: holds no API key")
    return frozenset(keys)
