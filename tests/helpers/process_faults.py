"""Kills and stops random processes of a deployment under load, for a given time: python tests/helpers/process_faults.py --minutes 10

Two prompt and two completion engines of a tiny model. Every answer is compared with the undisturbed one; after each fault the
survivors must let go of everything and the victim must come back. Prints a summary line per fault; exit code 1 at the first
broken promise.
"""

from __future__ import annotations

import argparse
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

import numpy as np
from deployment import ROOT, Deployment

from deepinfer_jax import LLM, SamplingParams

ALL = ("P0", "P1", "C0", "C1")
PARAMS = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)


class Client(threading.Thread):
    """Generates in a loop and checks every answer."""

    def __init__(self, address: str, prompts: list[list[int]], expected: list[list[int]]) -> None:
        super().__init__(daemon=True)
        self.address, self.prompts, self.expected = address, prompts, expected
        self.stop, self.counts, self.slowest, self.error = threading.Event(), Counter(), 0.0, None

    def run(self) -> None:
        try:
            with LLM(router=self.address) as llm:
                while not self.stop.is_set():
                    start = time.monotonic()
                    outputs = llm.generate(prompt_token_ids=self.prompts, sampling_params=PARAMS, use_tqdm=False)
                    self.slowest = max(self.slowest, time.monotonic() - start)
                    for output, expected in zip(outputs, self.expected, strict=True):
                        self._check(output.outputs[0], expected)
        except Exception as error:
            self.error = error

    def _check(self, completion, expected: list[int]) -> None:
        if completion.finish_reason == "error":
            assert completion.stop_reason, completion
            self.counts["failed with a reason"] += 1
        else:
            assert completion.token_ids == expected, (completion, expected)
            self.counts["right"] += 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--transport", default="host", choices=("host", "device"))
    args = parser.parse_args()
    rng = random.Random(args.seed)
    data = np.load(ROOT / "tests" / "golden" / "llama" / "golden.npz")
    prompts = [data[f"prompt_{i}"].tolist() for i in range(4)] * 2
    with tempfile.TemporaryDirectory() as folder, Deployment(Path(folder), peer_timeout=3) as d:
        for name in ALL:
            d.engine("prompt" if name[0] == "P" else "completion", name, peer_timeout=3, transport=args.transport)
        d.joined(*ALL)
        d.wait_for_engines(*ALL)
        with LLM(router=d.address) as llm:
            expected = [o.outputs[0].token_ids for o in llm.generate(prompt_token_ids=prompts, sampling_params=PARAMS, use_tqdm=False)]
        until, faults = time.monotonic() + 60 * args.minutes, 0
        while time.monotonic() < until:
            one_fault(d, rng, prompts, expected)
            faults += 1
    print(f"{faults} faults in {args.minutes} minutes: every answer right or with a reason, nothing held afterwards")
    return 0


def one_fault(d: Deployment, rng: random.Random, prompts: list[list[int]], expected: list[list[int]]) -> None:
    clients = [Client(d.address, prompts, expected) for _ in range(2)]
    for c in clients:
        c.start()
    time.sleep(rng.uniform(0.2, 2.0))
    victim, how = rng.choice(ALL), rng.choice(("kill -9", "SIGSTOP", "SIGTERM"))
    process = d.processes[victim]
    if how == "kill -9":
        process.kill()
    elif how == "SIGTERM":
        process.signal(signal.SIGTERM)
    else:
        process.signal(signal.SIGSTOP)
        time.sleep(rng.choice((1.0, 6.0)))  # shorter and longer than the time-out
        process.signal(signal.SIGCONT)
    if how == "SIGTERM":
        assert process.wait(90) == 0, process.text
    time.sleep(rng.uniform(0.5, 2.0))
    for c in clients:
        c.stop.set()
    for c in clients:
        c.join(60)
        assert not c.is_alive(), f"{victim} {how}: a client still waits"
        if c.error is not None:
            raise c.error
    d.wait_idle()
    if process.popen.poll() is not None:
        process.start()
    d.wait_for_engines(*ALL, timeout=180)
    counts, slowest = sum((c.counts for c in clients), Counter()), max(c.slowest for c in clients)
    print(f"{how:8} {victim}: {dict(counts)}, slowest batch {slowest:.1f} s", flush=True)


if __name__ == "__main__":
    sys.exit(main())
