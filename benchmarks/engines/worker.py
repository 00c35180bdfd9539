"""The loop of a benchmark worker: another engine in a process, and an interpreter, of its own.

One JSON object per line. In: {"prompts": [[ids]], "max_tokens": [n]}. Out: {"seconds": s, "tokens":
[[ids]], "peak_bytes": n}. Every request is greedy and ignores EOS. Import this module before the
engine: whatever that prints goes to stderr then. Runs on any Python >= 3.10.
"""

import json
import os
import sys
import time

answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # what an engine prints, from its import on, must not get between the answers


def serve(generate):
    """generate(prompts, max_tokens) -> token lists."""
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        start = time.perf_counter()
        tokens = generate(job["prompts"], job["max_tokens"])
        seconds = time.perf_counter() - start
        print(
            json.dumps({"seconds": seconds, "tokens": tokens, "peak_bytes": peak_bytes()}),
            file=answers,
            flush=True,
        )


def peak_bytes():
    """Most memory this program has had, without its children (getrusage would count the process it
    was forked from); 0: unknown."""
    try:
        lines = open("/proc/self/status").read().splitlines()  # noqa: SIM115
    except OSError:
        return 0
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM")), 0)
