"""GPUs a plan can be made for: what a device holds, and how fast it can possibly be.

Peaks are dense (no sparsity) figures of NVIDIA's data sheets: H100 and H200 SXM
(nvidia.com/en-us/data-center/h200, "H200 Tensor Core GPU" data sheet, 2024), B200
(nvidia.com/en-us/data-center/dgx-b200, data sheet 2024, per GPU), A100 80GB SXM (A100 data sheet,
2021). gb200 is a B200 in an NVL72 rack: 72 of them share NVLink ("GB200 NVL72" data sheet).
link_bandwidth is one direction of NVLink per GPU; network_bandwidth one direction of a 400 Gb/s
(A100: 200 Gb/s) adapter per GPU, the usual pairing in DGX and HGX systems. Memory is what the
driver offers, a little under the nominal size.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Gpu:
    """Bytes, FLOP/s and bytes/s of one device. fp8_flops None: no FP8 matrix units, weights are
    widened first."""

    name: str
    capability: tuple[int, int]
    cores: int
    memory_bytes: int
    bandwidth: float
    bf16_flops: float
    fp8_flops: float | None
    l2_bytes: int
    link_bandwidth: float
    network_bandwidth: float
    nvlink_domain: int = 8
    clock_ghz: float = 1.98

    def target_config(self) -> str:
        """The textproto that JAX's compile-only topology takes."""
        extension = "feature_extension: ACCELERATED_FEATURES" if self.capability[0] >= 9 else ""
        shared = 232448 if self.capability[0] >= 9 else 166912
        per_core = 233472 if self.capability[0] >= 9 else 167936
        return f"""gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
  shared_memory_per_core: {per_core}
  threads_per_core_limit: 2048 core_count: {self.cores} fpus_per_core: 128
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535
  block_dim_limit_z: 65535 memory_bandwidth: {int(self.bandwidth)} l2_cache_size: {self.l2_bytes}
  clock_rate_ghz: {self.clock_ghz}
  device_memory_size: {self.memory_bytes} shared_memory_per_block_optin: {shared}
  cuda_compute_capability {{ major: {self.capability[0]} minor: {self.capability[1]} {extension} }}
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 }}
device_description_str: "{self.name}"
"""


GPUS: dict[str, Gpu] = {
    "h200": Gpu(
        "NVIDIA H200",
        (9, 0),
        132,
        151_397_597_184,
        4.8e12,
        989.5e12,
        1979e12,
        52_428_800,
        450e9,
        50e9,
    ),
    "h100": Gpu(
        "NVIDIA H100 80GB HBM3",
        (9, 0),
        132,
        85_029_158_912,
        3.35e12,
        989.5e12,
        1979e12,
        52_428_800,
        450e9,
        50e9,
    ),
    "b200": Gpu(
        "NVIDIA B200",
        (10, 0),
        148,
        191_514_411_008,
        8.0e12,
        2250e12,
        4500e12,
        132_644_864,
        900e9,
        50e9,
    ),
    "gb200": Gpu(
        "NVIDIA GB200",
        (10, 0),
        148,
        191_514_411_008,
        8.0e12,
        2250e12,
        4500e12,
        132_644_864,
        900e9,
        50e9,
        nvlink_domain=72,
    ),
    "a100": Gpu(
        "NVIDIA A100-SXM4-80GB",
        (8, 0),
        108,
        85_051_572_224,
        2.039e12,
        312e12,
        None,
        41_943_040,
        300e9,
        25e9,
        clock_ghz=1.41,
    ),
}


def find_gpu(name: str) -> Gpu:
    """Raises ValueError with the known names."""
    try:
        return GPUS[name.lower()]
    except KeyError:
        raise ValueError(f"unknown GPU {name!r}; known: {', '.join(sorted(GPUS))}") from None
