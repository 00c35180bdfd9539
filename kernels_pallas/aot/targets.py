"""NVIDIA GPUs as descriptions that programs can be compiled for without the device.

Sizes per streaming multiprocessor: CUDA C++ Programming Guide, "Technical Specifications per
Compute Capability". Counts of multiprocessors, clocks, caches and memories: NVIDIA's data sheets
and architecture white papers of each product; memory is what the driver offers.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class GpuTarget:
    """What the compiler is told of a device. cores: streaming multiprocessors; bandwidth: bytes/s
    of its memory."""

    name: str
    capability: tuple[int, int]
    cores: int
    memory_bytes: int
    bandwidth: float
    l2_bytes: int
    clock_ghz: float = 1.98

    @property
    def shared_bytes_per_block(self) -> int:
        """Shared memory that one block may have. Mosaic takes 227 KiB for every target, so whoever
        compiles ahead of time compares with this."""
        return {(8, 0): 166_912, (8, 9): 101_376, (12, 0): 101_376}.get(self.capability, 232_448)

    def config(self) -> str:
        """The textproto that `topologies.get_topology_desc` takes as target_config."""
        major, minor = self.capability
        # without it every kernel for 12.0 is refused, with it every one for 8.x
        extension = "feature_extension: ACCELERATED_FEATURES" if major >= 9 else ""
        threads = 1536 if self.capability in ((8, 9), (12, 0)) else 2048
        return f"""gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
  shared_memory_per_core: {self.shared_bytes_per_block + 1024}
  threads_per_core_limit: {threads} core_count: {self.cores} fpus_per_core: 128
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535
  block_dim_limit_z: 65535 memory_bandwidth: {int(self.bandwidth)} l2_cache_size: {self.l2_bytes}
  clock_rate_ghz: {self.clock_ghz} device_memory_size: {self.memory_bytes}
  shared_memory_per_block_optin: {self.shared_bytes_per_block}
  cuda_compute_capability {{ major: {major} minor: {minor} {extension} }}
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 }}
device_description_str: "{self.name}"
"""


TARGETS: dict[str, GpuTarget] = {
    "a100": GpuTarget(
        "NVIDIA A100-SXM4-80GB", (8, 0), 108, 85_051_572_224, 2.039e12, 41_943_040, 1.41
    ),
    "rtx4090": GpuTarget(
        "NVIDIA GeForce RTX 4090", (8, 9), 128, 25_757_220_864, 1.008e12, 75_497_472, 2.52
    ),
    "h100": GpuTarget("NVIDIA H100 80GB HBM3", (9, 0), 132, 85_029_158_912, 3.35e12, 52_428_800),
    "h200": GpuTarget("NVIDIA H200", (9, 0), 132, 151_397_597_184, 4.8e12, 52_428_800),
    "h20": GpuTarget("NVIDIA H20", (9, 0), 78, 102_625_181_696, 4.0e12, 62_914_560),
    "gh200": GpuTarget("NVIDIA GH200 144G HBM3e", (9, 0), 132, 151_397_597_184, 4.9e12, 52_428_800),
    "b200": GpuTarget("NVIDIA B200", (10, 0), 148, 191_514_411_008, 8.0e12, 132_644_864),
    "gb200": GpuTarget("NVIDIA GB200", (10, 0), 148, 191_514_411_008, 8.0e12, 132_644_864),
}


def find_target(name: str) -> GpuTarget:
    """The target called `name` in any case; ValueError naming the known ones otherwise."""
    try:
        return TARGETS[name.lower()]
    except KeyError:
        raise ValueError(f"unknown GPU {name!r}; known: {', '.join(sorted(TARGETS))}") from None
