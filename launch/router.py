"""The router of a deployment: engines join it, clients send it requests. Needs no device and
imports no JAX.

  python -m deepinfer_jax.launch.router --listen 127.0.0.1:9510 --http-port 9511

http://127.0.0.1:9511/healthz says 200 while requests make progress and every role is there, 503 and
the reasons otherwise; /metrics is for Prometheus; /status is what `deepinfer-jax status` shows.
SIGTERM: takes nothing new, lets requests finish, ends.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections.abc import Sequence

from deepinfer_jax.flags import add_dataclass_flags, dataclass_values
from deepinfer_jax.launch.args import RouterArgs
from deepinfer_jax.launch.cluster.core import Cluster, ClusterConfig
from deepinfer_jax.launch.cluster.http import serve_http
from deepinfer_jax.launch.logs import set_up_logging
from deepinfer_jax.rpc.channel import HubConfig
from deepinfer_jax.rpc.endpoint import as_endpoint, is_loopback
from deepinfer_jax.rpc.security import Security
from deepinfer_jax.scheduler.routing.config import RouterConfig

SIGNAL_POLL = 0.1


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="deepinfer-jax launch router",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_dataclass_flags(parser, RouterArgs, "router")
    add_dataclass_flags(parser, RouterConfig, "balancing")
    args = parser.parse_args(argv)
    set_up_logging()
    try:
        return serve(
            RouterArgs(**dataclass_values(args, RouterArgs)),
            RouterConfig(**dataclass_values(args, RouterConfig)),
        )
    except (ValueError, OSError) as error:
        print(f"deepinfer-jax: error: {error}", file=sys.stderr, flush=True)
        return 2


def serve(a: RouterArgs, balancing: RouterConfig) -> int:
    config = ClusterConfig(
        listen=as_endpoint(a.listen),
        deadline=a.deadline,
        stall_timeout=a.stall_timeout,
        drain_timeout=a.drain_timeout,
        max_requests=a.max_requests,
        max_n=a.max_n,
        router=balancing,
        security=Security.from_file(a.secret_file),
        hub=HubConfig(heartbeat=a.heartbeat, peer_timeout=a.peer_timeout, max_frame=64 << 20),
    )
    cluster = Cluster(config)
    http = serve_http(cluster, a.http_host, a.http_port)
    stop: list[int] = []  # a handler may interrupt anything: it takes no lock
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: stop.append(number))
    cluster.start()
    print(
        f"router: listening on {cluster.endpoint}, http://{a.http_host}:{http.server_port}/healthz",
        flush=True,
    )
    if not is_loopback(a.http_host):
        print(
            f"router: anybody who reaches {a.http_host}:{http.server_port} can read the status",
            flush=True,
        )
    while cluster.hub.thread.is_alive() and not stop:
        time.sleep(SIGNAL_POLL)
    if cluster.hub.thread.is_alive():
        print("router: draining", flush=True)
        cluster.hub.call(cluster.begin_drain)
        while not cluster.drained:
            time.sleep(SIGNAL_POLL)
    alive = cluster.hub.thread.is_alive()
    cluster.hub.stop()
    http.close()
    print("router: stopped" if alive else "router: the network thread has failed", flush=True)
    return 0 if alive else 1


if __name__ == "__main__":
    sys.exit(main())
