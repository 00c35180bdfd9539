"""GPUs a plan can be made for: what a device holds, and how fast it can possibly be.

Peaks are dense (no sparsity) figures of NVIDIA's data sheets: H100 and H200 SXM
(nvidia.com/en-us/data-center/h200, "H200 Tensor Core GPU" data sheet, 2024), B200
(nvidia.com/en-us/data-center/dgx-b200, data sheet 2024, per GPU), A100 80GB SXM (A100 data sheet,
2021). gb200 is a B200 in an NVL72 rack: 72 of them share NVLink ("GB200 NVL72" data sheet).
link_bandwidth is one direction of NVLink per GPU; network_bandwidth one direction of a 400 Gb/s
(A100: 200 Gb/s) adapter per GPU, the usual pairing in DGX and HGX systems. h20: the data sheet of
vendors' HGX H20 systems; gh200: one superchip per node (GH200 data sheet, 2024).
"""

from __future__ import annotations

from dataclasses import dataclass

from deepinfer_jax.kernels_pallas.aot.targets import TARGETS, GpuTarget


@dataclass(frozen=True)
class Gpu:
    """A target with its peaks: FLOP/s of bfloat16 products and bytes/s, of one device."""

    target: GpuTarget
    bf16_flops: float
    link_bandwidth: float
    network_bandwidth: float
    nvlink_domain: int = 8

    @property
    def name(self) -> str:
        return self.target.name

    @property
    def memory_bytes(self) -> int:
        return self.target.memory_bytes

    @property
    def bandwidth(self) -> float:
        return self.target.bandwidth


GPUS: dict[str, Gpu] = {
    "h200": Gpu(TARGETS["h200"], 989.5e12, 450e9, 50e9),
    "h100": Gpu(TARGETS["h100"], 989.5e12, 450e9, 50e9),
    "h20": Gpu(TARGETS["h20"], 148e12, 450e9, 50e9),
    "gh200": Gpu(TARGETS["gh200"], 989.5e12, 450e9, 50e9, nvlink_domain=1),
    "b200": Gpu(TARGETS["b200"], 2250e12, 900e9, 50e9),
    "gb200": Gpu(TARGETS["gb200"], 2250e12, 900e9, 50e9, nvlink_domain=72),
    "a100": Gpu(TARGETS["a100"], 312e12, 300e9, 25e9),
}


def find_gpu(name: str) -> Gpu:
    """Raises ValueError with the known names."""
    try:
        return GPUS[name.lower()]
    except KeyError:
        raise ValueError(f"unknown GPU {name!r}; known: {', '.join(sorted(GPUS))}") from None
