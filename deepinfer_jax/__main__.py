"""`python -m deepinfer_jax` and the `deepinfer-jax` command.

Imports: cli.
"""

from __future__ import annotations

import sys

from deepinfer_jax.cli import main

if __name__ == "__main__":
    sys.exit(main())
