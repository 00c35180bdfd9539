"""The `deepinfer-jax` command: a table of subcommands, each a module with `add_arguments(parser)`
and `run(args) -> int`.

A subcommand's module is imported only when it is called, so `--help` is quick and `simulate` needs
no JAX. To add one, write the module and one line in COMMANDS.

Imports: deepinfer_jax, launch, serve, launch.planner, llm, rpc, kv, runner, text, models,
scheduler, scheduler.simulation, config, json_text, outputs, sampling_params, flags.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType

from deepinfer_jax import __version__

USAGE_ERROR = 2
INTERRUPTED = 130  # 128 + SIGINT, as shells report it


@dataclass(frozen=True)
class Command:
    name: str
    module: str
    help: str

    def load(self) -> ModuleType:
        return importlib.import_module(self.module)


COMMANDS = (
    Command(
        "generate",
        "deepinfer_jax.cli.generate",
        "complete prompts given on the command line or in a file",
    ),
    Command("chat", "deepinfer_jax.cli.chat", "talk to a chat model in the terminal"),
    Command("serve", "deepinfer_jax.cli.serve", "serve a model over HTTP with the OpenAI API"),
    Command("info", "deepinfer_jax.cli.info", "show devices, versions, and a model's sizes"),
    Command(
        "simulate",
        "deepinfer_jax.cli.simulate",
        "run a trace of arrivals through deployments, without a device",
    ),
    Command(
        "launch",
        "deepinfer_jax.cli.launch",
        "start one process of a deployment: router, prompt, completion or normal engine",
    ),
    Command("status", "deepinfer_jax.cli.status", "show the engines and requests of a deployment"),
    Command(
        "plan",
        "deepinfer_jax.launch.planner.command",
        "say what a deployment needs, before owning a GPU",
    ),
    Command("kv", "deepinfer_jax.cli.kv", "list, verify, collect or remove what a KV store holds"),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one subcommand; returns its exit code: 0, 2 for bad input (one line on stderr), 130 when
    interrupted."""
    argv = list(sys.argv[1:] if argv is None else argv)
    command = next((c for c in COMMANDS if argv and c.name == argv[0]), None)
    if command is None:
        return _no_command(argv)
    module = command.load()
    prog = f"deepinfer-jax {command.name}"
    parser = argparse.ArgumentParser(
        prog=prog,
        usage=f"{prog} [options]",
        description=module.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--traceback", action="store_true", help="show where an error comes from")
    module.add_arguments(parser)
    args = parser.parse_args(argv[1:])
    return _run(module, args)


def _run(module: ModuleType, args: argparse.Namespace) -> int:
    try:
        return module.run(args)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except (
        BrokenPipeError
    ):  # the reader (head, less) has gone; keep Python's shutdown from complaining about it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ValueError, OSError) as error:
        if args.traceback:
            raise
        print(f"deepinfer-jax: error: {_one_line(error)}", file=sys.stderr)
        return USAGE_ERROR


def _one_line(error: Exception) -> str:
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return " ".join(str(error).split())


def _no_command(argv: Sequence[str]) -> int:
    rows = "\n".join(f"  {c.name:<10} {c.help}" for c in COMMANDS)
    parser = argparse.ArgumentParser(
        prog="deepinfer-jax",
        usage="deepinfer-jax COMMAND [options]",
        description="LLM inference in JAX with prefill and decode apart.",
        epilog=f"commands:\n{rows}\n\n`deepinfer-jax COMMAND --help` shows a command's options.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"deepinfer-jax {__version__}")
    parser.add_argument("command", nargs="?", help=argparse.SUPPRESS)
    args = parser.parse_known_args(argv)[0]
    if args.command is not None:
        parser.error(
            f"unknown command {args.command!r}; known: {', '.join(c.name for c in COMMANDS)}"
        )
    parser.print_help()
    return USAGE_ERROR
