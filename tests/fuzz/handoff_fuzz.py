"""Random faults over a fake deployment (handoff_world.py).

As a script: `python tests/fuzz/handoff_fuzz.py --requests 100000 [--moves 20000] [--seed N]`; a
failing seed is printed. It also moves blocks between real pools (copies_fuzz.py).
"""

from __future__ import annotations

import argparse
import logging
import os
import random
import time
from collections import Counter

from handoff_world import EOS, Faults, World
from sched_device import continuation

PER_EPISODE = 100


def check_results(world: World, counts: Counter) -> None:
    """Every answer is exactly the model's, or says why there is none."""
    for request_id, output in world.results.items():
        request = world.prompts[request_id]
        prompt, params = request.prompt_token_ids, request.params
        for completion in output.outputs:
            tokens, reason = completion.token_ids, completion.finish_reason
            counts[reason] += 1
            assert tokens == continuation(prompt + tokens, len(prompt)), (request_id, reason)
            if reason == "length":
                assert len(tokens) == min(params.max_tokens, 48 - len(prompt)), (
                    request_id,
                    len(tokens),
                    params.max_tokens,
                )
            elif reason == "stop":
                assert tokens[-1] == EOS and EOS not in tokens[:-1]
            elif reason == "error":
                assert completion.stop_reason, "an error without a reason"
            else:
                assert reason == "abort" and request_id in world.aborted, (request_id, reason)


def episode(seed: int, requests: int = PER_EPISODE) -> Counter:
    rng = random.Random(seed)
    faults = Faults(
        drop=rng.choice([0, 0, 0.02, 0.1]),
        double=rng.choice([0, 0.1]),
        delay=rng.choice([0, 0.1, 0.3]),
        crash=rng.choice([0, 0, 0.005, 0.02]),
        stall=rng.choice([0, 0.01]),
        abort=rng.choice([0, 0.1]),
    )
    world = World(
        seed, faults, rng.randint(1, 3), rng.randint(1, 3), ce_blocks=rng.choice([12, 20, 40])
    )
    base = [rng.randint(2, 24) for _ in range(40)]
    for i in range(requests):
        length = rng.randint(1, 36)
        prompt = (
            base[:length] if rng.random() < 0.4 else [rng.randint(2, 24) for _ in range(length)]
        )
        world.add(
            f"r{i}",
            prompt,
            rng.randint(1, 12),
            rng.random() < 0.7,
            rng.random() < 0.4,
            rng.choice([1, 1, 1, 2]),
        )
        for _ in range(rng.choice([0, 1, 1, 2])):
            world.tick()
    world.settle()
    counts: Counter = Counter()
    check_results(world, counts)
    return counts


def fuzz(first_seed: int, requests: int) -> Counter:
    """Episodes from first_seed on until `requests` requests are done; finish reasons counted."""
    total: Counter = Counter()
    for seed in range(first_seed, first_seed + -(-requests // PER_EPISODE)):
        try:
            total += episode(seed)
        except Exception as error:
            error.add_note(f"fuzz seed {seed}")
            raise
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument(
        "--moves", type=int, default=20_000, help="payloads of blocks moved between real pools"
    )
    parser.add_argument("--seed", type=int, default=None)
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    seed = int(time.time()) % 1_000_000 * 1000 if arguments.seed is None else arguments.seed
    start, done = time.time(), 0
    total: Counter = Counter()
    while done < arguments.requests:
        total += fuzz(seed + done // PER_EPISODE, min(2000, arguments.requests - done))
        done += min(2000, arguments.requests - done)
        print(
            f"{done} requests from seed {seed}: {dict(total)}, {time.time() - start:.0f} s",
            flush=True,
        )
    os.environ["XLA_FLAGS"] = (
        # before JAX starts
        f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
    )
    from copies_fuzz import copies

    print(f"moving {arguments.moves} payloads, seed {seed}", flush=True)
    start = time.time()
    print(
        f"{copies(seed, arguments.moves)} payloads arrived as they were,"
        f" {time.time() - start:.0f} s"
    )


if __name__ == "__main__":
    main()
