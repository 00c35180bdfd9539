"""A channel's handler that notes what happens, and hub timings for tests."""

import threading

from deepinfer_jax.rpc.channel import HubConfig

FAST = HubConfig(heartbeat=0.05, peer_timeout=0.5, connect_timeout=1.0, max_frame=1 << 20)


class Handler:
    """Notes what happens."""

    def __init__(self):
        self.messages, self.ended, self.channel = [], None, None
        self.changed = threading.Condition()

    def _note(self, name, value):
        with self.changed:
            setattr(self, name, value)
            self.changed.notify_all()

    def opened(self, channel, welcome):
        self.welcome = welcome
        self._note("channel", channel)

    def message(self, channel, message, frames):
        with self.changed:
            self.messages.append((message, [bytes(f.buffer) for f in frames]))
            self.changed.notify_all()

    def lost(self, channel, reason, final):
        self._note("ended", (reason, final))

    def wait(self, condition, timeout=10):
        with self.changed:
            done = self.changed.wait_for(condition, timeout)
            assert done, (
                f"{len(self.messages)} messages, the last {self.messages[-1:]!r:.200}; ended:"
                f" {self.ended}"
            )
