"""An engine that prefills and decodes: one job, one or several processes, behind a router.

python -m deepinfer_jax.launch.normal --model demo --router 127.0.0.1:9510
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from deepinfer_jax.launch.common import role_main
from deepinfer_jax.scheduler.roles import EngineType


def main(argv: Sequence[str] | None = None) -> int:
    return role_main(EngineType.NORMAL, __doc__, argv)


if __name__ == "__main__":
    sys.exit(main())
