"""KV store and snapshots measured: bytes per second against plain files, TTFT against recompute,
the pause a snapshot makes, hit rates.

    # all sections, the demo model (SmolLM2-135M)
    python benchmarks/kv_store.py
    python benchmarks/kv_store.py --sections files orbax       # no model needed
    python benchmarks/kv_store.py --model tests/golden/llama   # tiny: seconds

Plain copies of the same bytes run in the same loop as what they are compared with; the best of
--repeats counts for both.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import shutil
import statistics
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import numpy as np

from deepinfer_jax.kv.store import KVStore, entries
from deepinfer_jax.kv.store_format import chain_keys, root_key
from deepinfer_jax.kv.tiers import Prefix, TieredStore

LAYOUT = {"model": "benchmark", "block_size": 16}


def best(
    call: Callable[[], object], repeats: int, before: Callable[[], object] = lambda: None
) -> float:
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
    arrays = {
        n: np.random.default_rng(i).standard_normal((count, *shape), np.float32)
        for i, n in enumerate("kv")
    }
    return (
        {n: (shape, np.float32) for n in "kv"},
        Prefix("", "", root, chain_keys(root, tokens, 16), tokens, 0, 16),
        arrays,
    )


def files(args: argparse.Namespace) -> None:
    """Pages of 737 KB (SmolLM2-135M in float32) and of 4.7 MB, written and read, against one plain
    file and one file per page."""
    for count, layers, width in ((96, 30, 192), (16, 48, 768)):
        with tempfile.TemporaryDirectory(dir=args.folder) as folder:
            _files(args, Path(folder), *pages(count, layers, width))


def _files(
    args: argparse.Namespace,
    folder: Path,
    shapes: dict,
    prefix: Prefix,
    arrays: dict[str, np.ndarray],
) -> None:
    total, count = sum(a.nbytes for a in arrays.values()), len(prefix.keys)
    raw = [
        np.concatenate([arrays[n][i].reshape(-1) for n in arrays]).tobytes() for i in range(count)
    ]
    buffers = [np.zeros(len(raw[0]), np.uint8) for _ in range(count)]
    tiers = {
        sync: TieredStore(shapes, KVStore(folder / "store", LAYOUT, fsync=sync))
        for sync in (False, True)
    }

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
    rows = {
        "file copy, one file": best(
            lambda: shutil.copyfile(folder / "one", folder / "two"), args.repeats, clear
        )
    }
    for sync in (False, True):
        name = " + fsync" if sync else ""
        rows[f"plain write, a file per page{name}"] = best(
            lambda s=sync: plain_write(s), args.repeats, clear
        )
        rows[f"store write{name}"] = best(
            lambda s=sync: tiers[s].save(prefix, arrays), args.repeats, clear
        )
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
    with (
        tempfile.TemporaryDirectory(dir=args.folder) as folder,
        ocp.StandardCheckpointer() as checkpointer,
    ):

        def save(path: str, tree: dict) -> None:
            shutil.rmtree(path, ignore_errors=True)
            checkpointer.save(path, tree)
            checkpointer.wait_until_finished()

        save(f"{folder}/warm", {n: a[:1] for n, a in arrays.items()})
        each = best(
            lambda: [
                save(f"{folder}/o{i}", {n: a[i] for n, a in arrays.items()}) for i in range(24)
            ],
            args.repeats,
        )
        whole = best(lambda: save(f"{folder}/all", arrays), args.repeats)
        target = {n: np.empty(a.shape[1:], a.dtype) for n, a in arrays.items()}
        read = best(
            lambda: [checkpointer.restore(f"{folder}/o{i}", target) for i in range(24)],
            args.repeats,
        )
        tiers = TieredStore(shapes, KVStore(f"{folder}/store", LAYOUT, fsync=False))
        clear = lambda: shutil.rmtree(f"{folder}/store", ignore_errors=True)  # noqa: E731
        ours = best(lambda: tiers.save(prefix, arrays), args.repeats, clear)
        ours_read = best(lambda: tiers.load(prefix), args.repeats)
        count = sum(p.is_file() for p in Path(f"{folder}/o0").rglob("*"))
    print(f"orbax: 24 blocks, {total / 1e6:.0f} MB; a checkpoint per block has {count} files")
    rows = {
        "Orbax, per block": each,
        "Orbax, all in one": whole,
        "store": ours,
        "Orbax read, per block": read,
        "store read": ours_read,
    }
    for name, seconds in rows.items():
        print(
            f"  {name:40} {total / seconds / 1e9:6.2f} GB/s  {1e3 * seconds / 24:8.2f} ms per block"
        )


def make_engine(args: argparse.Namespace, **changes):
    from deepinfer_jax import EngineArgs
    from deepinfer_jax.engine.llm_engine import LLMEngine

    size = args.max_model_len
    fields = {
        "max_model_len": size,
        "max_num_seqs": 8,
        "num_blocks": size // 16 * 8,
        "prefill_buckets": (64, 256, size),
        "warm_up": False,
    }
    fields |= {
        "max_num_batched_tokens": size,
        "decode_buckets": (8,),
        "max_logprobs": 1,
        "disable_log_stats": True,
    }
    fields |= {
        "stop_preempted_request": False,
        "prefill_buckets": tuple(sorted({64, min(256, size), size})),
    }
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
    engine.prefix_store.wait_saved()
    for s in engine.schedulers:
        s.blocks.drop_cache()


def ttft(args: argparse.Namespace) -> None:
    """The first token of a long prompt: computed, from disk, from host memory, from the device's
    prefix cache."""
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
            times: dict[str, list[float]] = {
                "computed": [],
                "disk": [],
                "host memory": [],
                "device": [],
            }
            tokens = set()

            def first(
                name: str, e, times: dict = times, tokens: set = tokens, prompt: list[int] = prompt
            ) -> None:
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
            print(
                f"  {length:5} tokens: "
                + ", ".join(f"{n} {1e3 * min(t):.1f}" for n, t in times.items())
            )
        engine.close()
        host.close()


def second(args: argparse.Namespace) -> None:
    """Another process on the same folder: its first token of prompts that the first one computed,
    beside prompts new to both."""
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        engine = make_engine(args, kv_store=folder)
        rng = np.random.default_rng(3)
        prompts = rng.integers(
            3, engine.model_config.vocab_size, (2 * args.repeats, args.max_model_len - 16)
        ).tolist()
        known, new = prompts[: args.repeats], prompts[args.repeats :]
        tokens = [generate(engine, [p], 8)[0].outputs[0].token_ids for p in known]
        engine.close()
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            stored, computed, same = pool.apply(_second_process, (args, folder, known, new, tokens))
        print(
            f"second: another process, prompts of {len(prompts[0])} tokens, median TTFT of"
            f" {args.repeats}: ",
            end="",
        )
        print(f"{1e3 * stored:.1f} ms from the store, {1e3 * computed:.1f} ms computed; ", end="")
        print(f"tokens as the first process's: {same} of {args.repeats}")


def _second_process(
    args: argparse.Namespace, folder: str, known: list, new: list, tokens: list
) -> tuple[float, float, int]:
    """(median TTFT of known prompts, of new ones, how many known prompts' tokens are `tokens`)."""
    engine = make_engine(args, kv_store=folder)
    for p in (known[0], new[0]):  # compiles
        generate(engine, [p], 1)
        forget(engine)
    stored = []
    for p in known:
        stored.append(generate(engine, [p], 8)[0])
        forget(engine)
    computed = [generate(engine, [[*p[1:], 3]], 8)[0] for p in new]
    engine.close()
    assert all(o.num_cached_tokens for o in stored) and not any(
        o.num_cached_tokens for o in computed
    )
    ttft = [
        statistics.median(o.metrics.time_to_first_token for o in outputs)
        for outputs in (stored, computed)
    ]
    return *ttft, sum(o.outputs[0].token_ids == t for o, t in zip(stored, tokens, strict=True))


def snapshot(args: argparse.Namespace) -> None:
    """What running requests see of snapshots: gaps between their tokens, without and with one
    inside, at several sizes of live KV."""
    from deepinfer_jax.snapshot.job import take

    engine = make_engine(args, zero_overhead_scheduling=True)
    rng = np.random.default_rng(1)
    print(
        "snapshot: gaps between tokens of 8 running requests, in median gaps (hold: at most one"
        " more than without a snapshot)"
    )
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        for length in (args.max_model_len // 16, args.max_model_len // 4, args.max_model_len // 2):
            prompts = [
                rng.integers(3, engine.model_config.vocab_size, length).tolist() for _ in range(8)
            ]
            generate(engine, prompts, 2)  # compiles
            take(engine, folder).wait()
            _gaps(args, engine, prompts, Path(folder))
        _files_of_a_snapshot(args, Path(folder))
    engine.close()


def _gaps(args: argparse.Namespace, engine, prompts: list[list[int]], folder: Path) -> None:
    """One line: --repeats snapshots taken by another thread, each after 15 steps without one."""
    from deepinfer_jax import SamplingParams
    from deepinfer_jax.snapshot.job import take

    most = args.max_model_len - len(prompts[0]) - 1
    for i, prompt in enumerate(prompts):
        engine.add_request(
            f"{i}-{time.perf_counter_ns()}",
            prompt,
            SamplingParams(max_tokens=most, temperature=0.0, ignore_eos=True),
        )
    while engine.schedulers[0].num_running < len(prompts):
        engine.step()
    gaps: dict[str, list[float]] = {"without": [], "fixing": [], "copying": [], "writing": []}
    jobs, job, quiet, last = [], None, 0, None
    while engine.has_unfinished_requests() and (job is not None or len(jobs) < args.repeats):
        known = job
        if job is None and quiet == 15:
            asked = threading.Thread(target=lambda: jobs.append(take(engine, folder)))
            asked.start()
            quiet = 0
        if not engine.step():
            continue
        now = time.perf_counter()
        job = jobs[-1] if jobs and not jobs[-1].done else None
        if job is not None and known is None:
            phase = "fixing"
        elif known is not None:
            phase = "writing" if known.holds else "copying"
        else:
            phase = "without"
            quiet += 1
        if last is not None:
            gaps[phase].append(now - last)
        last = now
    for j in jobs:
        j.wait()
    engine.abort_request(list(engine.live.requests))
    while engine.has_unfinished_requests():
        engine.step()
    median = statistics.median(gaps["without"])
    beyond = [(j.pause - j.drain) / median for j in jobs]
    slices = [s for j in jobs for s in j.holds]
    print(
        f"  {jobs[-1].nbytes / 1e6:.1f} MB, median gap without {1e3 * median:.1f} ms; load"
        f" {os.getloadavg()[0]:.1f}"
    )
    for name, g in gaps.items():
        longest = ", ".join(f"{x / median:.2f}" for x in sorted(g)[:-4:-1])
        print(
            f"    {name:8} {len(g):4} gaps: median {statistics.median(g) / median:.2f}, longest"
            f" {longest}"
        )
    print(
        f"    {len(jobs)} snapshots held steps for {min(beyond):.2f} to {max(beyond):.2f} gaps"
        f" beyond the step in flight, then {len(slices) // len(jobs)} times for"
        f" {statistics.median(slices) / median:.2f} (at most {max(slices) / median:.2f})"
    )


def _files_of_a_snapshot(args: argparse.Namespace, folder: Path) -> None:
    from deepinfer_jax.snapshot.files import load, write

    loaded = load(folder)
    data = bytes(sum(a.nbytes for caches in loaded.arrays.values() for a in caches.values()))
    seconds = best(lambda: write(loaded, folder), args.repeats)
    reading = best(lambda: load(folder), args.repeats)
    plain = best(lambda: Path(folder, "plain").write_bytes(data), args.repeats)
    rates = [len(data) / x / 1e9 for x in (seconds, reading, plain)]
    print(
        "  written at {:.2f} GB/s, read and checked at {:.2f}, plain file written at {:.2f}".format(
            *rates
        )
    )


def turns(args: argparse.Namespace) -> None:
    """Conversations that come back, recent ones more often, on engines whose device remembers
    little: what each tier is good for."""
    few, some = (
        args.max_model_len // 16 + 4,
        args.max_model_len // 16 * 2,
    )  # pages on the device; pages in host memory
    print(
        f"turns: 12 conversations, {TURNS} turns; {few} pages on the device, {some} in host memory,"
        " all on disk"
    )
    host = {"kv_host_bytes": some * (_page_bytes(args) + 4 * args.max_model_len)}
    for name, count, disk, fields in (
        ("device", 1, False, {"enable_prefix_caching": True}),
        ("device, disk", 1, True, {}),
        ("device, host", 1, False, host),
        ("device, host, disk", 1, True, host),
        ("device, host, disk, write-back", 1, True, host | {"kv_store_write": "back"}),
        ("device, host, disk, two engines by turns", 2, True, host),
    ):
        with tempfile.TemporaryDirectory(dir=args.folder) as folder:
            engines = [
                make_engine(
                    args, num_blocks=few, **fields, **({"kv_store": folder} if disk else {})
                )
                for _ in range(count)
            ]
            print(f"  {name}")
            _trace(args, engines)
            before = sum(1 for _ in entries(folder))
            for engine in engines:
                engine.close()
            if disk:
                print(
                    f"    on disk: {before} pages, {sum(1 for _ in entries(folder))} after closing"
                )


TURNS = 40


def _page_bytes(args: argparse.Namespace) -> int:
    engine = make_engine(args, num_blocks=args.max_model_len // 16 + 1)
    nbytes = engine.ensure_mover().block_bytes()
    engine.close()
    return nbytes


def _trace(args: argparse.Namespace, engines: list) -> None:
    """The same conversations whatever the engines: tokens do not depend on where KV comes from."""
    rng, length = np.random.default_rng(2), args.max_model_len // 8
    vocab = engines[0].model_config.vocab_size
    for engine in engines:  # compiles
        for size in (length, 3 * length, args.max_model_len - length):
            prompt = rng.integers(3, vocab, size).tolist()
            for tail in ([], [5] * (length // 2)):
                generate(engine, [prompt + tail], 1)
                if engine.prefix_store is not None:
                    forget(engine)
    system = rng.integers(3, vocab, length // 2).tolist()
    conversations = [
        system + rng.integers(3, vocab, 2 * length).tolist() for _ in range(12)
    ]  # the most recent one last
    totals, first, tokens = Counter(), defaultdict(list), 0
    for turn in range(TURNS):
        history = conversations.pop(-1 - min(int(rng.geometric(0.25)) - 1, 11))
        engine = engines[turn % len(engines)]
        before = _counts(engine)
        output = generate(engine, [history], length // 8)[0]
        if engine.prefix_store is not None:
            engine.prefix_store.wait_saved()
        source = Counter(_counts(engine))
        source.subtract(before)
        pages = (len(history) - 1) // 16
        cached = output.num_cached_tokens // 16
        found = {
            "device": cached - source["host"] - source["disk"],
            "host": source["host"],
            "disk": source["disk"],
        }
        found["computed"] = pages - cached
        totals.update(found)
        first[max(found, key=found.get)].append((output.metrics.time_to_first_token, len(history)))
        tokens += len(history)
        grown = history + output.outputs[0].token_ids + rng.integers(3, vocab, length // 8).tolist()
        conversations.append(
            grown
            if len(grown) < args.max_model_len - length // 4
            else system + grown[-2 * length :]
        )
    pages = sum(totals.values())
    print(
        f"    {tokens} prompt tokens; pages found: "
        + ", ".join(f"{n} {100 * c / pages:.1f} %" for n, c in totals.items())
    )
    for name in ("computed", "disk", "host", "device"):
        if first[name]:
            seconds, sizes = (statistics.median(x) for x in zip(*first[name], strict=True))
            print(
                f"    mostly {name:8} {len(first[name]):3} turns: median prompt {sizes:.0f} tokens,"
                f" TTFT {1e3 * seconds:.1f} ms"
            )
    if engines[0].prefix_store is not None:
        s: Counter[str] = Counter()
        for engine in engines:
            s.update(engine.prefix_store.stats())
        print(
            "    "
            + ", ".join(
                f"{k} {s[k]}"
                for k in ("saved", "loaded", "disk_written", "written_back", "dropped")
            )
        )


def _counts(engine) -> dict[str, int]:
    s = {} if engine.prefix_store is None else engine.prefix_store.stats()
    return {"host": s.get("host_hits", 0), "disk": s.get("disk_hits", 0)}


SECTIONS = {
    "files": files,
    "orbax": orbax,
    "ttft": ttft,
    "second": second,
    "snapshot": snapshot,
    "turns": turns,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="demo")
    parser.add_argument("--max-model-len", type=int, default=512)
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--folder", help="where to put the files (default: the system's temporary folder)"
    )
    args = parser.parse_args()
    for name in args.sections:
        SECTIONS[name](args)


if __name__ == "__main__":
    main()
