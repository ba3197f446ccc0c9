"""GPUs as data: what a plan needs to know of one, each figure with the sheet that states it.

`memory_gb` is the datasheet's, taken as 10^9 bytes (some cards have up to 7 % more). Throughputs are dense, without
sparsity, tensor cores accumulating in float32; `fp32` is the plain units', for TF32 is switched off in every build.
"""

from __future__ import annotations

from dataclasses import dataclass

from exporter.errors import InputError


@dataclass(frozen=True)
class GPU:
    """One device: memory in GB, bandwidth in GB/s, dense TFLOPS by dtype (None: not supported), compute capability,
    the backend that serves it, and where the figures are from. `derived` names those that no sheet states."""

    name: str
    memory_gb: float
    bandwidth_gbs: float
    fp16: float
    fp8: float | None
    fp32: float
    capability: str
    source: str
    derived: str = ""

    @property
    def backend(self) -> str:
        """TensorRT for data-centre Hopper and Blackwell, which TensorRT-RTX does not list; TensorRT-RTX elsewhere."""
        return "trt" if self.capability in ("9.0", "10.0") else "trt-rtx"

    def tflops(self, dtype: str) -> float:
        """Dense TFLOPS of a compute dtype; fp16 and bf16 run at one rate."""
        return self.fp32 if dtype == "fp32" else self.fp16


GPUS = {g.name: g for g in (
    GPU("a100-40gb", 40, 1555, 312, None, 19.5, "8.0", "NVIDIA A100 Tensor Core GPU datasheet, 2020 (40 GB)"),
    GPU("a100-80gb", 80, 2039, 312, None, 19.5, "8.0", "NVIDIA A100 Tensor Core GPU datasheet, 2021 (80 GB SXM)"),
    GPU("h100-pcie", 80, 2000, 756.5, 1513, 51, "9.0", "NVIDIA H100 Tensor Core GPU datasheet, 2022 (PCIe)",
        "fp16 and fp8: half of the sparse figures that the sheet prints"),
    GPU("h100-sxm", 80, 3350, 989.5, 1979, 67, "9.0", "NVIDIA H100 Tensor Core GPU datasheet, 2022 (SXM)",
        "fp16 and fp8: half of the sparse figures that the sheet prints"),
    GPU("h200", 141, 4800, 989.5, 1979, 67, "9.0", "NVIDIA H200 Tensor Core GPU datasheet, 2023 (SXM)",
        "fp16 and fp8: half of the sparse figures that the sheet prints"),
    GPU("b200", 180, 7700, 2250, 4500, 75, "10.0", "NVIDIA HGX B200 datasheet, 2025 (one GPU of eight)",
        "fp16 and fp8: half of the sparse figures that the sheet prints"),
    GPU("l4", 24, 300, 121, 242.5, 30.3, "8.9", "NVIDIA L4 Tensor Core GPU datasheet, 2023",
        "fp16 and fp8: half of the sparse figures that the sheet prints"),
    GPU("l40s", 48, 864, 362.05, 733, 91.6, "8.9", "NVIDIA L40S datasheet, 2023"),
    GPU("a10", 24, 600, 125, None, 31.2, "8.6", "NVIDIA A10 Tensor Core GPU datasheet, 2021"),
    GPU("rtx-4090", 24, 1008, 165.2, 330.3, 82.6, "8.9", "NVIDIA Ada GPU Architecture whitepaper, 2022"),
    GPU("rtx-5090", 32, 1792, 209.5, 419, 104.8, "12.0", "NVIDIA RTX Blackwell GPU Architecture whitepaper, 2025"),
    GPU("rtx-6000-ada", 48, 960, 364.2, 728.5, 91.1, "8.9", "NVIDIA RTX 6000 Ada Generation datasheet, 2022",
        "fp16 and fp8: from the sheet's sparse FP8 figure"),
    GPU("rtx-pro-6000", 96, 1792, 500, 1000, 125, "12.0",
        "NVIDIA RTX PRO 6000 Blackwell Workstation Edition datasheet, 2025",
        "fp16 and fp8: an eighth and a quarter of the sheet's sparse FP4 figure"),
    GPU("gb10", 128, 273, 125, 250, 31, "12.1", "NVIDIA DGX Spark datasheet, 2025 (memory shared with the CPU)",
        "fp16 and fp8: an eighth and a quarter of the sheet's sparse FP4 figure; fp32: Hot Chips 2025"),
)}


def gpu(name: str) -> GPU:
    """A GPU by name; InputError lists the known ones."""
    found = GPUS.get(name.lower().replace("_", "-").replace(" ", "-"))
    if found is None:
        raise InputError(f"--gpu {name!r}: not in the list; expected one of {', '.join(GPUS)} (or give --memory GB)")
    return found
