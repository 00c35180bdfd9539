"""Where the log of a process goes."""

from __future__ import annotations

import logging
import sys

from deepinfer_jax import environ


def set_up_logging() -> None:
    level = environ.get("LOG_LEVEL", str)
    logging.basicConfig(
        level=level, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr
    )
