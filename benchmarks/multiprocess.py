"""What processes cost: KV between two of them per transport, the router's work per request, whole
deployments.

  python benchmarks/multiprocess.py               everything (about three minutes on two cores)
  python benchmarks/multiprocess.py links router deployments

Every number is printed beside what it should be compared with, from the same run: medians. Each
part starts its own processes on loopback and ends them.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests" / "helpers" / "processes"))

import msgspec  # noqa: E402
import numpy as np  # noqa: E402

from deepinfer_jax.disagg.layout import make_layout  # noqa: E402
from deepinfer_jax.rpc import messages as wire  # noqa: E402
from deepinfer_jax.rpc.channel import HubConfig  # noqa: E402
from deepinfer_jax.rpc.hub import Hub  # noqa: E402
from deepinfer_jax.rpc.security import Security  # noqa: E402
from deepinfer_jax.scheduler.roles import EngineType  # noqa: E402

SIZES_MB = (1, 16, 64)
SECRET = b"benchmark secret, not secret"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "parts", nargs="*", choices=[*PARTS, []], help=f"of {', '.join(PARTS)}; default all"
    )
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(args.child)
        return
    print(f"{os.cpu_count()} cores, load average {os.getloadavg()[0]:.1f}")
    for part in args.parts or PARTS:
        print(f"== {part}", flush=True)
        PARTS[part]()


# ---- bytes between two processes -----------------------------------------------------------------


class Waiter:
    """A channel's handler; counts what comes."""

    def __init__(self, on_message: Any = None) -> None:
        self.channel: Any = None
        self.opened_event, self.acks = threading.Event(), threading.Semaphore(0)
        self.on_message = on_message
        self.last: Any = None

    def opened(self, channel: Any, welcome: wire.Welcome) -> None:
        self.channel, self.welcome = channel, welcome
        self.opened_event.set()

    def message(self, channel: Any, message: wire.WireMessage, frames: Any) -> None:
        self.last = message
        if self.on_message is not None:
            self.on_message(channel, message, frames)
        self.acks.release()

    def lost(self, channel: Any, reason: str, final: bool) -> None:
        if reason.find("stopped") < 0:
            print(f"lost: {reason}", flush=True)


def hand(said: str) -> wire.Hand:
    return wire.Hand(msgspec.Raw(msgspec.msgpack.encode(said)))


def child(kind: str) -> None:
    """The receiving process: puts every payload on its device, then acknowledges."""
    import jax

    from deepinfer_jax.launch import device_links

    server = device_links.start_server("127.0.0.1")
    secret = SECRET if kind == "curve" else None
    hub = Hub("child", Security(secret), HubConfig(peer_timeout=60, heartbeat=1))
    device, connections = jax.local_devices()[0], {}
    decode = msgspec.msgpack.decode

    def on_message(channel: Any, message: Any, frames: Any) -> None:
        if message.remote is None:
            arrays = [jax.device_put(np.frombuffer(f.buffer, np.float32), device) for f in frames]
        else:
            address = decode(message.body)
            if address not in connections:
                connections[address] = server.connect(address)
            sharding = jax.sharding.SingleDeviceSharding(device)
            spec = jax.ShapeDtypeStruct((message.remote.size,), np.float32, sharding=sharding)
            arrays = connections[address].pull(message.remote.number, [spec])
        jax.block_until_ready(arrays)
        channel.send(hand("ack"))

    def accept(channel: Any, hello: wire.Hello) -> wire.Welcome:
        channel.handler = Waiter(on_message)
        return wire.Welcome("child")

    print(hub.listen("tcp://127.0.0.1:0", accept), flush=True)
    hub.start()
    sys.stdin.read()
    hub.stop()


def bench_links() -> None:
    import jax

    from deepinfer_jax.launch import device_links

    server = device_links.start_server("127.0.0.1")
    for transport in ("host", "host + CURVE", "device"):
        kind = "curve" if "CURVE" in transport else "plain"
        process = subprocess.Popen(
            [sys.executable, __file__, "--child", kind],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        hub = Hub(
            "parent",
            Security(SECRET if kind == "curve" else None),
            HubConfig(peer_timeout=60, heartbeat=1),
        ).start()
        waiter = Waiter()
        hub.dial(
            process.stdout.readline().strip(), wire.Hello(wire.PROTOCOL, "client", "bench"), waiter
        )
        waiter.opened_event.wait(30)
        number = iter(range(1 << 40, 1 << 50))
        for size in SIZES_MB:
            array = jax.device_put(np.random.default_rng(0).random(size << 18, np.float32))

            def send(
                array: Any = array,
                transport: str = transport,
                waiter: Any = waiter,
                number: Any = number,
            ) -> None:
                pages = hand(server.address())
                if transport == "device":
                    n = next(number)
                    server.await_pull(n, [array])
                    pages.remote = wire.Remote(n, 1, array.size)
                    waiter.channel.send(pages)
                else:
                    waiter.channel.send(pages, [memoryview(np.asarray(array)).cast("B")])
                waiter.acks.acquire()

            with socket_copy(size << 20) as copy:
                seconds, plain = medians(send, copy)
            rate, reference = size / 1024 / seconds, size / 1024 / plain
            print(
                f"{transport:13} {size:3} MB: {1e3 * seconds:7.1f} ms, {rate:5.2f} GiB/s; plain TCP"
                f" copy {reference:5.2f} GiB/s ({rate / reference:4.0%})",
                flush=True,
            )
        hub.stop()
        process.stdin.close()
        process.wait(30)


def medians(*functions: Callable[[], object], rounds: int = 9) -> list[float]:
    """Seconds of each, by turns; the first round is not counted."""
    taken: list[list[float]] = [[] for _ in functions]
    for _ in range(rounds + 1):
        for function, seconds in zip(functions, taken, strict=True):
            start = time.perf_counter()
            function()
            seconds.append(time.perf_counter() - start)
    return [statistics.median(seconds[1:]) for seconds in taken]


@contextlib.contextmanager
def socket_copy(size: int) -> Iterator[Callable[[], None]]:
    """A function that copies size bytes over a loopback connection, as fast as Python's sockets go:
    connection and buffers are there before, and every page has been written."""
    data, into = memoryview(bytearray(b"x") * size), memoryview(bytearray(b"y") * size)
    with socket.create_server(("127.0.0.1", 0)) as server:
        sender = socket.create_connection(server.getsockname())
        receiver, _ = server.accept()

    def copy() -> None:
        thread = threading.Thread(target=sender.sendall, args=(data,))
        thread.start()
        at = 0
        while at < size:
            at += receiver.recv_into(into[at:])
        thread.join()

    with sender, receiver:
        yield copy


# ---- the router ----------------------------------------------------------------------------------


class ScriptedEngine:
    """Answers at once what an engine would: the router's cost is all that is left."""

    def __init__(
        self, kind: str, name: str, endpoint: str, others: dict[str, ScriptedEngine]
    ) -> None:
        self.kind, self.name, self.others = kind, name, others
        self.hub = Hub(name).start()
        self.ready = threading.Event()
        role = {"prompt": 1, "completion": 2}[kind]
        layout = make_layout(EngineType(role), "m", {"block_size": 16, "caches": []}, 4096)
        model = wire.ModelInfo("/nowhere", 4096, 1000, [2], 0, enable_penalties=True)
        hello = wire.Hello(
            wire.PROTOCOL,
            kind,
            name,
            job=name,
            layout=layout.to_plain(),
            capacity=(4096, 1 << 24, 4096),
            data="-",
            model=model,
        )
        self.hub.dial(endpoint, hello, self)

    def opened(self, channel: Any, welcome: wire.Welcome) -> None:
        self.channel = channel
        self.ready.set()

    def lost(self, channel: Any, reason: str, final: bool) -> None:
        pass

    def message(self, channel: Any, m: wire.WireMessage, frames: Any) -> None:
        from deepinfer_jax.outputs import CompletionOutput, RequestMetrics, RequestOutput

        if isinstance(m, wire.Start):
            channel.send(wire.AssignDecode(m.attempt))
        elif isinstance(m, wire.Assigned) and m.target is not None:
            channel.send(wire.Progress(m.attempt, 128, 0.001))
            channel.send(wire.Prefilled(m.attempt))
            channel.send(wire.HandedOver(m.attempt, m.target))
            completion = CompletionOutput(0, "", [1] * 64, finish_reason="stop")
            name, metrics = str(m.attempt.handoff(1)), RequestMetrics(0.0)
            result = wire.Result(RequestOutput(name, None, [], None, [completion], True, metrics))
            self.others[m.target].channel.send(result)


def bench_router(count: int = 5000) -> None:
    import psutil
    from deployment import Deployment

    from deepinfer_jax.rpc.client import RemoteEngine
    from deepinfer_jax.sampling_params import SamplingParams

    with tempfile.TemporaryDirectory() as folder, Deployment(Path(folder)) as d:
        completions: dict[str, ScriptedEngine] = {}
        completions["C"] = ScriptedEngine("completion", "C", f"tcp://{d.address}", {})
        prompt = ScriptedEngine("prompt", "P", f"tcp://{d.address}", completions)
        for engine in (prompt, *completions.values()):
            engine.ready.wait(10)
        client = RemoteEngine(d.address)
        router = psutil.Process(d.router.popen.pid)
        for n in (200, count):
            cpu, start, ended = sum(router.cpu_times()[:2]), time.perf_counter(), 0
            params = SamplingParams(max_tokens=64)
            for i in range(n):
                client.add_request(str(i), list(range(1, 129)), params)
            while ended < n:
                ended += sum(o.finished for o in client.step())
            seconds, cpu = time.perf_counter() - start, sum(router.cpu_times()[:2]) - cpu
        one = []
        for i in range(200):
            start = time.perf_counter()
            client.add_request(f"one{i}", list(range(1, 129)), params)
            while not client.step():
                pass
            one.append(time.perf_counter() - start)
        print(
            f"{count} requests of 128 + 64 tokens through router and scripted engines:"
            f" {count / seconds:.0f} requests/s, router CPU {1e6 * cpu / count:.0f} us per request;"
            f" one alone {1e3 * statistics.median(one):.2f} ms (median)",
            flush=True,
        )
        client.close()
        for engine in (prompt, *completions.values()):
            engine.hub.stop(0)


# ---- deployments ---------------------------------------------------------------------------------


def bench_deployments(prompts: int = 64, tokens: int = 32) -> None:
    from deployment import Deployment

    from deepinfer_jax import LLM, SamplingParams

    rng = np.random.default_rng(0)
    batch = [rng.integers(3, 500, int(n)).tolist() for n in rng.integers(32, 200, prompts)]
    params = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)
    for p, c, transport in ((1, 1, "host"), (1, 1, "device"), (2, 1, "host"), (1, 2, "host")):
        with tempfile.TemporaryDirectory() as folder, Deployment(Path(folder)) as d:
            names = [f"P{i}" for i in range(p)] + [f"C{i}" for i in range(c)]
            for name in names:
                d.engine(
                    "prompt" if name[0] == "P" else "completion",
                    name,
                    transport=transport,
                    num_blocks=160,
                )
            d.joined(*names)
            d.wait_for_engines(*names)
            with LLM(router=d.address) as llm:
                llm.generate(prompt_token_ids=batch[:8], sampling_params=params, use_tqdm=False)
                start = time.perf_counter()
                outputs = llm.generate(
                    prompt_token_ids=batch, sampling_params=params, use_tqdm=False
                )
                seconds = time.perf_counter() - start
            generated = sum(len(o.outputs[0].token_ids) for o in outputs)
            ttft = statistics.median(o.metrics.time_to_first_token for o in outputs)
            time.sleep(0.5)
            moved = statistics.median(
                e["hand_over_ms"] for e in d.status()["engines"] if "hand_over_ms" in e
            )
            print(
                f"{p}P:{c}D {transport:6} {generated / seconds:7.0f} tokens/s,"
                f" {prompts / seconds:6.1f} requests/s, medians: TTFT {1e3 * ttft:.0f} ms,"
                f" hand-over {moved:.1f} ms (load average {os.getloadavg()[0]:.1f})",
                flush=True,
            )


PARTS = {"links": bench_links, "router": bench_router, "deployments": bench_deployments}

if __name__ == "__main__":
    main()
