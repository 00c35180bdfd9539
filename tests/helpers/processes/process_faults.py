"""Hurts the processes of a deployment under load.

    python tests/helpers/processes/process_faults.py [--minutes 10]

A router, two prompt engines (one a job of two processes), two completion engines and two clients,
each process on a host of its own in a private network (see network.py; where that is refused: all
on loopback, and the network is left alone). First each kind of fault once on each kind of process,
lasting --seconds; then faults drawn at random. Engines that end are started again, as a supervisor
would. After each fault: every request has ended once, right or with a reason, within the deadline;
only the victim's job has been started again; everybody serves and nobody holds anything. At the end
engines drain and count their blocks. Prints a line per fault; exit code 1 at the first broken
promise.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import network
import numpy as np
from deployment import ROOT, SMALL, Deployment, Process

from deepinfer_jax import LLM, SamplingParams

MODEL = "llama"
TOKENS = 60
DEADLINE = 10.0
WORK = 3.0
"""Seconds a request may take besides waiting for a fault to be noticed, on a busy machine."""
HOWS = ("kill -9", "SIGSTOP", "cut", "split", "SIGTERM")
"""split: a prompt engine and C0 cannot reach each other, but everybody else."""
NETWORK = ("cut", "split")
JOBS = ("P1", "C2")
"""Engines that are jobs of two processes."""
EACH = [
    f"{how}:{victim}" for victim in ("router", "P0", "P1.1", "C0", "client0") for how in HOWS[:3]
] + ["split:P0"]


class Broken(AssertionError):
    pass


def require(condition: Any, message: object) -> None:
    if not condition:
        raise Broken(message)


class World:
    """A deployment, what it should answer, and its supervisor."""

    def __init__(
        self,
        folder: Path,
        net: network.Network | None,
        engines: Iterable[str],
        transport: str,
        peer_timeout: float,
    ) -> None:
        self.folder, self.net, self.clients = folder, net, 0
        data = np.load(ROOT / "tests" / "golden" / MODEL / "golden.npz")
        prompts = [data[f"prompt_{i}"].tolist() for i in range(4)]
        (folder / "prompts.json").write_text(json.dumps(prompts))
        self.expected = undisturbed(prompts)
        self.d = Deployment(folder, network=net, peer_timeout=peer_timeout)
        self.engines: set[str] = set()
        try:
            self.start(engines, transport, peer_timeout)
        except BaseException:
            self.d.close()
            raise

    def start(self, engines: Iterable[str], transport: str, peer_timeout: float) -> None:
        d = self.d
        for name in engines:
            flags = {"peer_timeout": peer_timeout, "transport": transport}
            role = "prompt" if name[0] == "P" else "completion"
            if name in JOBS:
                self.engines |= set(
                    d.job(role, name, MODEL, cpu_devices=1, data_parallel_size=2, **flags)
                )
            else:
                d.engine(role, name, MODEL, **flags)
                self.engines.add(name)
        d.joined(*self.engines)
        d.wait_for_engines(*self.engines)

    # ---- the supervisor --------------------------------------------------------------------------

    def watch(self, seconds: float) -> set[str]:
        """Starts again what has ended; the names."""
        started, until = set(), time.monotonic() + seconds
        while time.monotonic() < until:
            for name in ("router", *self.engines):
                if self.d.processes[name].popen.poll() is not None:
                    self.d.processes[name].start()
                    started.add(name)
            time.sleep(0.1)
        return started

    def recover(self, timeout: float = 90.0) -> set[str]:
        """Until all engines serve."""
        started, until = set(), time.monotonic() + timeout
        while True:
            started |= self.watch(0.3)
            try:
                serving = {e["name"] for e in self.d.status()["engines"] if e["state"] == "serving"}
            except OSError as error:
                serving = {str(error)}
            if serving == self.engines:
                return started
            require(time.monotonic() < until, f"serving {serving}, expected {self.engines}")

    def job_of(self, victim: str) -> set[str]:
        return {
            n for n in ("router", *self.engines) if n.partition(".")[0] == victim.partition(".")[0]
        }

    # ---- one fault -------------------------------------------------------------------------------

    def fault(self, how: str, victim: str, seconds: float) -> str:
        clients = {f"client{i}": self.start_client(f"client{i}") for i in range(2)}
        for c in clients.values():
            c.wait_for(r'(.*"finish".*\n){8}', 60)
        started = self.hurt(how, clients.get(victim) or self.d.processes[victim], victim, seconds)
        started |= self.watch(3.0)
        counts, slowest = Counter(), 0.0
        for name, c in clients.items():
            if name == victim and how == "kill -9":
                continue
            c.signal(signal.SIGTERM)
            require(c.wait(60) == 0, f"{name}: {c.text[-2000:]}")
            seen, longest = self.check_answers(name, c.text)
            counts += seen
            if not (name == victim and how == "SIGSTOP"):  # it was not there to see the time pass
                slowest = max(slowest, longest)
        started |= self.recover()
        self.d.wait_idle()
        require(started <= self.job_of(victim), f"{started} were started again")
        line = (
            f"{how:8} {victim:8} {dict(counts)}, slowest {slowest:.1f} s, started again:"
            f" {', '.join(sorted(started)) or 'nobody'}"
        )
        require(slowest < DEADLINE + WORK, line)
        return line

    def hurt(self, how: str, process: Process, victim: str, seconds: float) -> set[str]:
        if how == "kill -9":
            process.kill()
            return set()
        if how == "SIGTERM":
            process.signal(signal.SIGTERM)
            started = self.watch(0.0)
            require(process.wait(90) == 0, process.text[-2000:])
            return started
        if how == "SIGSTOP":
            begin, end = (
                lambda: process.signal(signal.SIGSTOP),
                lambda: process.signal(signal.SIGCONT),
            )
        else:
            host, other = self.net.hosts[self.d.hosts[process.name]], self.net.hosts["C0"]
            begin, end = (
                (host.cut, host.heal)
                if how == "cut"
                else (lambda: host.split(other), lambda: host.rejoin(other))
            )
        begin()
        started = self.watch(seconds)
        end()
        return started

    def start_client(self, host: str) -> Process:
        self.clients += 1
        arguments = [
            "--router",
            self.d.address,
            "--prompts",
            str(self.folder / "prompts.json"),
            "--max-tokens",
            str(TOKENS),
        ]
        if self.d.secret is not None:
            arguments += ["--secret-file", str(self.d.secret)]
        return self.d.command(
            f"client-{self.clients}",
            host,
            [str(Path(__file__).parent / "load_client.py"), *arguments],
        )

    def check_answers(self, name: str, text: str) -> tuple[Counter[str], float]:
        """Right ones and reasons, and the longest time one took."""
        lines = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
        answers, total, counts = [x for x in lines if "id" in x], lines[-1], Counter()
        require(
            total.get("sent")
            == total.get("ended")
            == len({a["id"] for a in answers})
            == len(answers),
            (name, total, len(answers)),
        )
        for a in answers:
            right = self.expected[a["prompt"]]
            if a["finish"] == "error":
                require(a["reason"] and a["tokens"] == right[: len(a["tokens"])], (name, a))
                counts["with a reason"] += 1
            else:
                require(a["tokens"] == right, (name, a, right))
                counts["right"] += 1
        return counts, max((a["seconds"] for a in answers), default=0.0)

    def drain(self) -> None:
        """Everybody leaves, with all its blocks."""
        for name in self.engines:
            self.d.processes[name].signal(signal.SIGTERM)
        for name in self.engines:
            process = self.d.processes[name]
            require(
                process.wait(60) == 0 and f"{name}: 0 of " in process.text, process.text[-2000:]
            )
        self.d.router.signal(signal.SIGTERM)
        require(self.d.router.wait(30) == 0, self.d.router.text[-2000:])


def undisturbed(prompts: list[list[int]]) -> list[list[int]]:
    """A NORMAL engine's answers."""
    sizes = {k.replace("-", "_"): v for k, v in SMALL.items()} | {
        "prefill_buckets": (256,),
        "decode_buckets": (8,),
    }
    params = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
    with LLM(str(ROOT / "tests" / "golden" / MODEL), **sizes) as llm:
        return [
            o.outputs[0].token_ids
            for o in llm.generate(prompt_token_ids=prompts, sampling_params=params, use_tqdm=False)
        ]


def drawn(rng: random.Random, world: World) -> tuple[str, str, float]:
    """SIGTERM is for engines: a job leaves as a whole, a client and a router have nobody to start
    them again in time."""
    how = rng.choice([h for h in HOWS if world.net is not None or h not in NETWORK])
    prompts = [n for n in world.engines if n[0] == "P"]
    victims = {"SIGTERM": [n for n in world.engines if "." not in n], "split": prompts}.get(
        how, ["router", *world.engines, "client0"]
    )
    return how, rng.choice(sorted(victims)), rng.choice((1.0, 7.0))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--minutes", type=float, default=0.0, help="of random faults, after the listed ones"
    )
    parser.add_argument(
        "--faults", nargs="*", default=EACH, help="how:victim ...; by default each once"
    )
    parser.add_argument("--seconds", type=float, default=30.0, help="that SIGSTOP and cuts last")
    parser.add_argument(
        "--engines",
        nargs="+",
        default=["P0", "P1", "C0", "C1"],
        help=f"P.. and C..; {JOBS} are jobs of two processes",
    )
    parser.add_argument("--peer-timeout", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--transport", default="host", choices=("host", "device"))
    args = parser.parse_args()
    refused = network.why_not()
    if refused is None:
        network.own_network()
    else:
        print(f"no network of our own, so no cuts and splits: {refused}")
    rng, start, count = random.Random(args.seed), time.monotonic(), 0
    with tempfile.TemporaryDirectory() as folder:
        net = network.Network() if refused is None else None
        world = World(Path(folder), net, args.engines, args.transport, args.peer_timeout)
        print(f"serving after {time.monotonic() - start:.0f} s", flush=True)
        try:
            for fault in args.faults:
                how, _, victim = fault.partition(":")
                if how not in NETWORK or net is not None:
                    print(world.fault(how, victim, args.seconds), flush=True)
                    count += 1
            until = time.monotonic() + 60 * args.minutes
            while time.monotonic() < until:
                print(world.fault(*drawn(rng, world)), flush=True)
                count += 1
            world.drain()
        except Broken:
            for process in world.d.processes.values():
                print(
                    f"---- {process.name}\n{process.log.read_text(errors='replace')[-3000:]}",
                    flush=True,
                )
            raise
        finally:
            world.d.close()
            if net is not None:
                net.close()
    print(
        f"{count} faults in {time.monotonic() - start:.0f} s: every answer right or with a reason,"
        " in time, and nothing held afterwards"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
