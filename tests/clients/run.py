"""Clients that people already have, against a server of our own: each in an environment of its own.

    python tests/clients/run.py [--only NAME,NAME] [--folder build/clients]

One `deepinfer-jax serve` of the demo model answers them all. A client whose environment cannot be
made is skipped with the reason; the exit status is 1 if one that ran has failed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
MODEL = "demo"
SIZES = {
    "max-model-len": "1024",
    "max-num-seqs": "16",
    "max-num-batched-tokens": "1024",
    "prefill-buckets": "256,1024",
    "decode-buckets": "4,16",
}


class Skipped(Exception):
    """This client cannot be installed here."""


@dataclass(frozen=True)
class Place:
    """Where a client runs. url: of the server, without a path."""

    folder: Path
    url: str

    def environment(self, packages: tuple[str, ...]) -> Path:
        """A Python of its own with the packages."""
        python = self.folder / "env" / "bin" / "python"
        if not python.exists():
            run([sys.executable, "-m", "venv", str(self.folder / "env")], Skipped)
        run([str(python), "-m", "pip", "install", "--quiet", *packages], Skipped)
        return python


def run(
    command: list[str], failure: type[Exception] = AssertionError, cwd: Path | None = None
) -> str:
    """stdout; `failure` with the end of what it printed if it does not exit with 0."""
    result = subprocess.run(command, capture_output=True, text=True, cwd=cwd)
    if result.returncode:
        raise failure((result.stdout + result.stderr).strip()[-1500:])
    return result.stdout


def openai_python(place: Place) -> str:
    python = place.environment(("openai>=2",))
    return run([str(python), str(HERE / "openai_python.py"), place.url, MODEL])


def openai_javascript(place: Place) -> str:
    if shutil.which("npm") is None:
        raise Skipped("no npm on this machine")
    run(["npm", "install", "--silent", "--prefix", str(place.folder), "openai"], Skipped)
    script = shutil.copy(HERE / "openai_javascript.mjs", place.folder)
    return run(["node", str(script), place.url, MODEL])


def schemathesis(place: Place) -> str:
    """Random requests by the server's own OpenAPI document: no answer may be a server error, and
    all must be what the document says."""
    python = place.environment(("schemathesis>=4",))
    command = [str(python.parent / "schemathesis"), "run", f"{place.url}/openapi.json"]
    checks = "not_a_server_error,status_code_conformance,content_type_conformance"
    command += ["--checks", f"{checks},response_schema_conformance", "--phases", "fuzzing"]
    command += ["--max-examples", "60", "--request-timeout", "60", "--seed", "1", "--no-color"]
    lines = run(command, cwd=place.folder).splitlines()
    return next(x for x in lines if "generated," in x)


def lm_eval(place: Place) -> str:
    python = place.environment(("lm-eval[api]>=0.4.9", "transformers"))
    return run([sys.executable, str(HERE / "lm_eval_scores.py"), str(python), place.url, MODEL])


def page(place: Place) -> str:
    """The page in a headless Chromium: a chat is answered, the engines are shown."""
    chromium = shutil.which("chromium")
    if chromium is None:
        raise Skipped("no chromium on this machine (Debian: apt-get install chromium)")
    python = place.environment(("playwright>=1.50",))
    shot = place.folder / "page.png"
    return run([str(python), str(HERE / "page.py"), place.url, chromium, str(shot)])


CLIENTS: dict[str, Callable[[Place], str]] = {
    "openai-python": openai_python,
    "openai-javascript": openai_javascript,
    "schemathesis": schemathesis,
    "lm-eval": lm_eval,
    "page": page,
}


@contextlib.contextmanager
def server(folder: Path) -> Iterator[str]:
    """The URL of a server that is ready."""
    flags = [x for name, value in SIZES.items() for x in (f"--{name}", value)]
    command = [sys.executable, "-m", "deepinfer_jax", "serve", "--model", MODEL, "--port", "0"]
    log = folder / "server.log"
    with log.open("w") as out:
        environment = {"JAX_PLATFORMS": "cpu"} | os.environ
        process = subprocess.Popen([*command, *flags], stderr=out, cwd=ROOT, env=environment)
        try:
            while (found := re.search(r"on (http://\S+)", log.read_text())) is None:
                if process.poll() is not None:
                    raise RuntimeError(log.read_text()[-2000:])
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(0.2)
            yield found[1]
        finally:
            process.terminate()
            process.wait(60)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default=",".join(CLIENTS))
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "clients")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    failed = 0
    with server(args.folder) as url:
        for name in args.only.split(","):
            folder = args.folder / name
            folder.mkdir(exist_ok=True)
            try:
                print(f"{name}: passed: {CLIENTS[name](Place(folder, url)).strip()}", flush=True)
            except Skipped as reason:
                print(f"{name}: SKIPPED: {reason}", flush=True)
            except AssertionError as error:
                failed += 1
                print(f"{name}: FAILED: {error}", flush=True)
    print(json.dumps({"failed": failed}))
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
