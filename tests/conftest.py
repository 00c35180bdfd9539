"""Every test process sees eight CPU devices, so that sharded programs are tested on one machine.
Must run before jax is imported."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = (
        f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8".strip()
    )
if "xla_backend_optimization_level" not in os.environ["XLA_FLAGS"]:
    os.environ["XLA_FLAGS"] += (
        " --xla_backend_optimization_level=0"  # tests compile a lot and compute little
    )

COVERS = {  # folders of tests that are not named like a package
    "api": "the names and modules that users import, and the parameters they set",
    "project": "the rules of the house, read from the source; documents; dependencies",
}


def pytest_sessionstart(session):
    """Says what the folders named on the command line cover."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None or hasattr(session.config, "workerinput"):
        return
    for folder in dict.fromkeys(a.partition("::")[0].rstrip("/") for a in session.config.args):
        covered = covers(folder)
        if covered:
            reporter.write_line(f"{folder}: {covered}")


def covers(folder: str) -> str | None:
    """`tests/kv` -> what the package of the same name is for; None for anything else."""
    import source_tree
    from picture import sentence

    parts = os.path.relpath(os.path.abspath(folder), source_tree.ROOT).split(os.sep)
    if parts[0] != "tests" or len(parts) == 1:
        return None
    module = source_tree.units().get(".".join(parts[1:]))
    return COVERS.get(parts[1]) if module is None else sentence(module)
