"""A client process: keeps some requests going through a router, and prints a JSON line for each
that has ended.

SIGTERM: no new ones; it ends when all have ended. When the router is lost it connects again. A
second end of a request, or an output of one that it never sent, is an exception, and exit code 1.
"""

from __future__ import annotations

import argparse
import json
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path

from deepinfer_jax.rpc.client import RemoteEngine
from deepinfer_jax.sampling_params import RequestOutputKind, SamplingParams


@dataclass
class Sent:
    prompt: int
    start: float
    tokens: list[int] = field(default_factory=list)


class Client:
    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.prompts = args, json.loads(Path(args.prompts).read_text())
        whole = SamplingParams(
            temperature=0.0,
            max_tokens=args.max_tokens,
            ignore_eos=True,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        self.params = (whole, whole.replace(output_kind=RequestOutputKind.DELTA))
        self.sent = self.ended = 0
        self.stopping = False

    def stop(self, *_: object) -> None:
        self.stopping = True

    def run(self) -> None:
        while not self.stopping:
            try:
                engine = RemoteEngine(
                    self.args.router, secret=self.args.secret_file, connect_timeout=5
                )
            except ConnectionError as error:
                say(no_connection=str(error))
            else:
                self.serve(engine)
                engine.close()
        say(sent=self.sent, ended=self.ended)

    def serve(self, engine: RemoteEngine) -> None:
        live: dict[str, Sent] = {}
        lost = False
        while live or not (self.stopping or lost):
            while len(live) < self.args.outstanding and not (self.stopping or lost):
                name, prompt = f"r{self.sent}", self.sent % len(self.prompts)
                try:
                    engine.add_request(
                        name, self.prompts[prompt], self.params[self.sent // len(self.prompts) % 2]
                    )
                except RuntimeError:  # the router is lost
                    lost = True
                else:
                    live[name] = Sent(prompt, time.monotonic())
                    self.sent += 1
            for output in engine.step():
                request, completion = live[output.request_id], output.outputs[0]
                request.tokens += completion.token_ids
                if output.finished:
                    del live[output.request_id]
                    self.ended += 1
                    now = time.monotonic()
                    what = {
                        "id": output.request_id,
                        "prompt": request.prompt,
                        "tokens": request.tokens,
                    }
                    say(
                        **what,
                        finish=completion.finish_reason,
                        reason=completion.stop_reason,
                        at=now,
                        seconds=now - request.start,
                    )


def say(**values: object) -> None:
    print(json.dumps(values), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--router", required=True)
    parser.add_argument("--secret-file")
    parser.add_argument("--prompts", required=True, help="JSON file: lists of token ids")
    parser.add_argument("--outstanding", type=int, default=4)
    parser.add_argument("--max-tokens", type=int, default=60)
    client = Client(parser.parse_args())
    signal.signal(signal.SIGTERM, client.stop)
    client.run()


if __name__ == "__main__":
    main()
