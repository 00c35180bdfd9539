"""KV store and snapshots measured: bytes per second against plain files, TTFT against recompute, the pause a snapshot makes, hit rates.

    python benchmarks/kv_store.py                              # all sections, the demo model (SmolLM2-135M)
    python benchmarks/kv_store.py --sections files orbax       # no model needed
    python benchmarks/kv_store.py --model tests/golden/llama   # tiny: seconds

Plain copies of the same bytes run in the same loop as what they are compared with; the best of --repeats counts for both.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import numpy as np

from deepinfer_jax.kv_store import KVStore, entries
from deepinfer_jax.kv_store_format import chain_keys, root_key
from deepinfer_jax.kv_tiers import Prefix, TieredStore

LAYOUT = {"model": "benchmark", "block_size": 16}


def best(call: Callable[[], object], repeats: int, before: Callable[[], object] = lambda: None) -> float:
    """Seconds of the fastest of `repeats` calls, each after an untimed before()."""
    times = []
    for _ in range(repeats):
        before()
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times)


def pages(count: int, layers: int, width: int) -> tuple[dict, Prefix, dict[str, np.ndarray]]:
    shape = (layers, 16, width)
    tokens = np.arange(16 * count, dtype=np.int32)
    root = root_key(LAYOUT, "", "")
    arrays = {n: np.random.default_rng(i).standard_normal((count, *shape), np.float32) for i, n in enumerate("kv")}
    return {n: (shape, np.float32) for n in "kv"}, Prefix("", "", root, chain_keys(root, tokens, 16), tokens, 0, 16), arrays


def files(args: argparse.Namespace) -> None:
    """Pages of 737 KB (SmolLM2-135M in float32) and of 4.7 MB, written and read, against one plain file and one file per page."""
    for count, layers, width in ((96, 30, 192), (16, 48, 768)):
        with tempfile.TemporaryDirectory(dir=args.folder) as folder:
            _files(args, Path(folder), *pages(count, layers, width))


def _files(args: argparse.Namespace, folder: Path, shapes: dict, prefix: Prefix, arrays: dict[str, np.ndarray]) -> None:
    total, count = sum(a.nbytes for a in arrays.values()), len(prefix.keys)
    raw = [np.concatenate([arrays[n][i].reshape(-1) for n in arrays]).tobytes() for i in range(count)]
    buffers = [np.zeros(len(raw[0]), np.uint8) for _ in range(count)]
    tiers = {sync: TieredStore(shapes, KVStore(folder / "store", LAYOUT, fsync=sync)) for sync in (False, True)}

    def plain_write(sync: bool) -> None:
        for i, data in enumerate(raw):
            with open(folder / f"plain{i}", "wb", buffering=0) as f:
                f.write(data)
                if sync:
                    os.fsync(f.fileno())

    def plain_read() -> None:
        for i, buffer in enumerate(buffers):
            with open(folder / f"plain{i}", "rb", buffering=0) as f:
                f.readinto(buffer)

    def clear() -> None:
        for path in (*folder.glob("plain*"), folder / "two"):
            path.unlink(missing_ok=True)
        shutil.rmtree(folder / "store", ignore_errors=True)

    (folder / "one").write_bytes(b"".join(raw))
    rows = {"file copy, one file": best(lambda: shutil.copyfile(folder / "one", folder / "two"), args.repeats, clear)}
    for sync in (False, True):
        name = " + fsync" if sync else ""
        rows[f"plain write, a file per page{name}"] = best(lambda s=sync: plain_write(s), args.repeats, clear)
        rows[f"store write{name}"] = best(lambda s=sync: tiers[s].save(prefix, arrays), args.repeats, clear)
    plain_write(False)
    rows["plain read, a file per page"] = best(plain_read, args.repeats)
    rows["store read, every byte checked"] = best(lambda: tiers[False].load(prefix), args.repeats)
    print(f"files: {count} pages of {total / count / 1e6:.2f} MB, {total / 1e6:.0f} MB")
    for name, seconds in rows.items():
        print(f"  {name:40} {total / seconds / 1e9:6.2f} GB/s  {1e3 * seconds:8.1f} ms")


def orbax(args: argparse.Namespace) -> None:
    """One Orbax checkpoint per block, and one for all of them, against the store's files."""
    import orbax.checkpoint as ocp

    shapes, prefix, arrays = pages(24, 30, 192)
    total = sum(a.nbytes for a in arrays.values())
    with tempfile.TemporaryDirectory(dir=args.folder) as folder, ocp.StandardCheckpointer() as checkpointer:

        def save(path: str, tree: dict) -> None:
            shutil.rmtree(path, ignore_errors=True)
            checkpointer.save(path, tree)
            checkpointer.wait_until_finished()

        save(f"{folder}/warm", {n: a[:1] for n, a in arrays.items()})
        each = best(lambda: [save(f"{folder}/o{i}", {n: a[i] for n, a in arrays.items()}) for i in range(24)], args.repeats)
        whole = best(lambda: save(f"{folder}/all", arrays), args.repeats)
        target = {n: np.empty(a.shape[1:], a.dtype) for n, a in arrays.items()}
        read = best(lambda: [checkpointer.restore(f"{folder}/o{i}", target) for i in range(24)], args.repeats)
        tiers = TieredStore(shapes, KVStore(f"{folder}/store", LAYOUT, fsync=False))
        clear = lambda: shutil.rmtree(f"{folder}/store", ignore_errors=True)  # noqa: E731
        ours = best(lambda: tiers.save(prefix, arrays), args.repeats, clear)
        ours_read = best(lambda: tiers.load(prefix), args.repeats)
        count = sum(p.is_file() for p in Path(f"{folder}/o0").rglob("*"))
    print(f"orbax: 24 blocks, {total / 1e6:.0f} MB; a checkpoint per block has {count} files")
    rows = {"Orbax, per block": each, "Orbax, all in one": whole, "store": ours, "Orbax read, per block": read, "store read": ours_read}
    for name, seconds in rows.items():
        print(f"  {name:40} {total / seconds / 1e9:6.2f} GB/s  {1e3 * seconds / 24:8.2f} ms per block")


def make_engine(args: argparse.Namespace, **changes):
    from deepinfer_jax import EngineArgs
    from deepinfer_jax.engine import LLMEngine

    size = args.max_model_len
    fields = {"max_model_len": size, "max_num_seqs": 8, "num_blocks": size // 16 * 8, "prefill_buckets": (64, 256, size), "warm_up": False}
    fields |= {"max_num_batched_tokens": size, "decode_buckets": (8,), "max_logprobs": 1, "disable_log_stats": True}
    fields |= {"stop_preempted_request": False, "prefill_buckets": tuple(sorted({64, min(256, size), size}))}
    return LLMEngine(EngineArgs(args.model, **(fields | changes)))


def generate(engine, prompts: list[list[int]], tokens: int):
    from deepinfer_jax import SamplingParams

    params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
    for i, prompt in enumerate(prompts):
        engine.add_request(f"{i}-{time.perf_counter_ns()}", prompt, params)
    done = []
    while engine.has_unfinished_requests():
        done += [o for o in engine.step() if o.finished]
    return done


def forget(engine) -> None:
    engine.kv.wait_saved()
    for s in engine.schedulers:
        s.blocks.drop_cache()


def ttft(args: argparse.Namespace) -> None:
    """The first token of a long prompt: computed, from disk, from host memory, from the device's prefix cache."""
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        engine = make_engine(args, kv_store=folder)
        host = make_engine(args, kv_host_bytes=1 << 30)
        vocab = engine.model_config.vocab_size
        rng = np.random.default_rng(0)
        print("ttft: milliseconds to the first token of a prompt whose beginning is known")
        for length in (args.max_model_len // 4, args.max_model_len - 16):
            prompt = rng.integers(3, vocab, length).tolist()
            warm = rng.integers(3, vocab, length).tolist()
            for e in (engine, host):
                for _ in range(2):  # compiles: whole prompt, rest of a prompt
                    generate(e, [warm], 1)
                    forget(e)
            times: dict[str, list[float]] = {"computed": [], "disk": [], "host memory": [], "device": []}
            tokens = set()

            def first(name: str, e, times: dict = times, tokens: set = tokens, prompt: list[int] = prompt) -> None:
                output = generate(e, [prompt], 1)[0]
                times[name].append(output.metrics.time_to_first_token)
                tokens.add(tuple(output.outputs[0].token_ids))

            for repeat in range(args.repeats):
                prompt[0] = 3 + repeat  # a new prefix
                tokens.clear()
                for e in (engine, host):
                    first("computed", e)
                    forget(e)
                    first("disk" if e is engine else "host memory", e)
                    first("device", e)
                    forget(e)
                assert len(tokens) == 1, tokens
            print(f"  {length:5} tokens: " + ", ".join(f"{n} {1e3 * min(t):.1f}" for n, t in times.items()))
        engine.close()
        host.close()


def snapshot(args: argparse.Namespace) -> None:
    """What running requests see of a snapshot: the longest gap between their tokens, with and without one."""
    engine = make_engine(args, zero_overhead_scheduling=True)
    rng = np.random.default_rng(1)
    half = args.max_model_len // 2
    prompts = [rng.integers(3, engine.model_config.vocab_size, half).tolist() for _ in range(8)]
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        generate(engine, prompts, 4)
        engine.snapshot(folder).wait()  # compiles the copy programs
        from deepinfer_jax import SamplingParams

        for i, prompt in enumerate(prompts):
            engine.add_request(str(i), prompt, SamplingParams(max_tokens=half - 1, temperature=0.0, ignore_eos=True))
        for _ in range(20):
            engine.step()
        steps, jobs = [], []
        while engine.has_unfinished_requests() and len(steps) < half - 40:
            start = time.perf_counter()
            engine.step()
            steps.append(time.perf_counter() - start)
            if len(steps) in (20, 60):
                thread = threading.Thread(target=lambda: jobs.append(engine.snapshot(folder)))
                thread.start()
        for job in jobs:
            job.wait()
        median = statistics.median(steps)
        quiet, near = steps[:19], [max(steps[20:23]), max(steps[60:63])]
        print(f"snapshot: {jobs[0].nbytes / 1e6:.1f} MB of 8 running requests, step {1e3 * median:.2f} ms median")
        held = ", ".join(f"{1e3 * j.pause:.2f} ms ({1e3 * j.drain:.2f} until the step in flight had ended)" for j in jobs)
        extra = min(j.pause - j.drain for j in jobs) / median
        print(f"  engine held for {held}; beyond that step: {extra:.2f} steps (hold: 1)")
        copies = ", ".join(f"{1e3 * n:.2f}" for n in near)
        print(f"  longest step: {1e3 * max(quiet):.2f} ms before, {copies} ms with the snapshot's copy in it")
        data = bytes(jobs[0].nbytes)
        from deepinfer_jax.snapshot import load, write

        loaded = load(folder)
        seconds = best(lambda: write(loaded, Path(folder)), args.repeats)
        reading = best(lambda: load(folder), args.repeats)
        plain = best(lambda: Path(folder, "plain").write_bytes(data), args.repeats)
        rates = [len(data) / x / 1e9 for x in (seconds, reading, plain)]
        print("  written at {:.2f} GB/s, read and checked at {:.2f}, plain file written at {:.2f}".format(*rates))
    engine.close()


def turns(args: argparse.Namespace) -> None:
    """Conversations that come back: two engines by turns, device pools too small to remember them all."""
    rng = np.random.default_rng(2)
    length = args.max_model_len // 8
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        small = args.max_model_len // 16 * 3
        a = make_engine(args, kv_store=folder, kv_host_bytes=32 << 20, num_blocks=small)
        b = make_engine(args, kv_store=folder, num_blocks=small)
        vocab = a.model_config.vocab_size
        system = rng.integers(3, vocab, length).tolist()
        conversations = [system + rng.integers(3, vocab, length // 2).tolist() for _ in range(8)]
        asked = 0
        cached = 0
        for turn in range(4):
            for i, history in enumerate(conversations):
                engine = (a, b)[(turn + i) % 2]
                output = generate(engine, [history], length // 4)[0]
                asked, cached = asked + len(history), cached + output.num_cached_tokens
                conversations[i] = history + output.outputs[0].token_ids + rng.integers(3, vocab, length // 4).tolist()
            for engine in (a, b):
                engine.kv.wait_saved()
        print(f"turns: 8 conversations x 4 turns on 2 engines, {asked} prompt tokens, {100 * cached / asked:.1f} % of them not computed")
        for name, engine in (("host memory + disk", a), ("disk", b)):
            s = engine.kv.stats()
            print(f"  {name}: " + ", ".join(f"{k} {s.get(k, 0)}" for k in ("device_hits", "host_hits", "disk_hits", "misses", "saved")))
        print(f"  on disk: {sum(1 for _ in entries(folder))} pages")
        a.close()
        b.close()


SECTIONS = {"files": files, "orbax": orbax, "ttft": ttft, "snapshot": snapshot, "turns": turns}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--max-model-len", type=int, default=512)
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--folder", help="where to put the files (default: the system's temporary folder)")
    args = parser.parse_args()
    for name in args.sections:
        SECTIONS[name](args)


if __name__ == "__main__":
    main()
