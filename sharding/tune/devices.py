"""Devices: peak rates, memory, links, and the fraction of the peaks that programs reach."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from ...mesh.text import shortened
from ...mesh.topology import Link, Topology

GB, GiB = 1e9, 2**30


@dataclass(frozen=True)
class Device:
    """Device(name, flops, memory, bandwidth): what one accelerator can do.

    Attributes:
        name: for tables.
        flops: peak of matrix products in bfloat16, dense, per second.
        float32: the same in float32, without TF32, which torch does not use unless it is told to;
            by default a fifteenth, as on an H100.
        memory: bytes, as torch reports them; about 1 % fewer than on the data sheet.
        bandwidth: bytes per second that its memory reads and writes.
        local: the link to the other devices of its node.
        network: the link to other nodes, of one device.
        matmul: fraction of `flops` that matrix products reach.
        attention, attention_backward: fraction of `flops` that fused attention reaches, and its
            backward.
        traffic: fraction of `bandwidth` that other operators reach.
        launch: the shortest time of a kernel, in seconds.
        again: by the kind of recomputation, "selective" or "full", the seconds that the host takes
            for a kernel that is computed again, with what recomputation itself does in Python;
            `launch` where it is not given.
        message: seconds that sending a microbatch to another stage, or receiving one, takes of the
            host, with the pipeline's own Python; 0 if kernels hide it.
        split_backward: seconds that the host takes longer for an operator of a backward that runs
            in two parts, as "zb_h1" has it.
        arrival: by the number of ranks, by how many seconds a collective that computation waits for
            takes longer than those that follow one another, as ranks do not arrive together.
        is_host: whether kernels run on the cores that launch them, so that launching takes time of
            its own.
        sharing: ranks for each core, all of whom compute at the rates above at the same time; a
            rank that waits leaves its share of the core to others. 1 for accelerators.
        sums: by collective, how much longer one takes that sums in bfloat16, for as many bytes,
            than in float32: 1 where it is not given, as where links decide.
        occupied: fraction of the multiprocessors that a collective takes from kernels next to it.
        collectives: measured (latency, bytes of the whole tensor per second) of a collective inside
            a node, by the number of ranks; empty if there is no such table.
        source: where the numbers are from.
    """

    name: str
    flops: float
    memory: float
    bandwidth: float
    local: Link
    network: Link
    matmul: float = 0.70
    attention: float = 0.34
    attention_backward: float = 0.30
    traffic: float = 0.80
    launch: float = 7e-6
    again: Mapping[str, float] = field(default_factory=dict)
    message: float = 0.0
    split_backward: float = 0.0
    arrival: Mapping[int, float] = field(default_factory=dict)
    is_host: bool = False
    sharing: float = 1.0
    sums: Mapping[str, float] = field(default_factory=dict)
    occupied: float = 24 / 132
    collectives: Mapping[str, Mapping[int, tuple[float, float]]] = field(default_factory=dict)
    float32: float = 0.0
    source: str = ""

    def peak(self, dtype: str) -> float:
        """Return the peak of matrix products in a dtype: "bfloat16" or "float32"."""
        if dtype == "bfloat16":
            return self.flops
        return self.float32 or self.flops / 15

    def summing(self, op: str, dtype: str) -> float:
        """Return how much longer a collective takes that sums in a dtype than in float32."""
        return self.sums.get(op, 1.0) if dtype == "bfloat16" else 1.0

    def topology(self, node: int) -> Topology:
        """Return the topology of nodes of so many of these devices, by data sheets."""
        return Topology(self.local, self.network, self.bandwidth / 2, node_size=node)


# Peaks in float32 are those of the data sheets without tensor cores. With TF32, which
# torch.set_float32_matmul_precision("high") turns on, they are 156 (A100), 494 (H100, H200) and
# 1,125 TFLOP/s (B200), half of the figures with sparsity.
#
# Fractions. Matrix products: 70 % of the peak, and at least 7 us for a kernel, as AutoParallel
# (meta-pytorch) takes.
# Attention: causal, heads of 128, 8,192 positions, by the FlashAttention-2 that torch's
# scaled_dot_product_attention runs; without a causal mask it reaches about a tenth more. On an H100
# forward reaches 333 TFLOP/s, 34 % (370 without a mask; Shah et al. 2024, arXiv 2407.08608, figure
# 5). Forward and backward together, 4 and 10 parts of the flops, reach 308 (335 without a mask; Dao
# 2023, arXiv 2307.08691, figure 7), so backward reaches 299, 30 %; figure 6 of Shah et al. has
# backward only without a mask, 318. On an A100 both together reach 182, 58 % of 312 (Dao 2023,
# figure 4). Forward and backward share it here as they do at 16,384 positions without a mask, where
# both reach 203 and backward 196 (figures 4 and 6).
# Other operators: 80 % of the memory's bandwidth. Collectives: NCCL's all_gather of FSDP launches
# 24 blocks, each of which occupies one of an H100's 132 multiprocessors (NVIDIA's developer forum,
# topic 337991); computation next to collectives was measured to take 18.9 % longer on average, on
# A100, H100, MI210 and MI250 (arXiv 2507.03114).
#
# A device with a limit of power below that of its data sheet computes at a lower clock. The power
# of a circuit grows with clock times voltage squared, and voltage with the clock, so the clock goes
# with the cube root of the power. It concerns products and attention, which take the most power.
_AT_500_OF_700_W = (500 / 700) ** (1 / 3)

# Latencies are those of mesh/topology.py: NCCL's model of a ring of 8 GPUs, and over two nodes.
_LOCAL_LATENCY, _NETWORK_LATENCY = 11e-6, 23e-6
# NCCL 2.27.5 on an H100 node with NVSwitch, out of place, 1 GB: the tables of AutoParallel
# (meta-pytorch/autoparallel, cost_models/nccl_cost_model.py). Latency and size over time.
_GATHER = {2: (8e-6, 537 * GB), 4: (17e-6, 434 * GB), 8: (30e-6, 394 * GB)}
_REDUCE = {2: (10e-6, 324 * GB), 4: (15e-6, 236 * GB), 8: (31e-6, 267 * GB)}
_NVSWITCH_H100 = {"all_gather": _GATHER, "reduce_scatter": _GATHER, "all_reduce": _REDUCE}


def _nvlink(bandwidth: float) -> Link:
    return Link(_LOCAL_LATENCY, bandwidth)


def _port(bits: float) -> Link:
    return Link(_NETWORK_LATENCY, bits / 8)


_H100 = Device(
    "h100",
    flops=989e12,
    memory=79 * GiB,
    bandwidth=3.35e12,
    local=_nvlink(450e9),
    network=_port(400e9),
    collectives=_NVSWITCH_H100,
    float32=67e12,
    source="NVIDIA H100 SXM data sheet: 989 TFLOP/s, in float32 67, 80 GB, 3.35 TB/s, NVLink "
    "900 GB/s both ways; DGX H100: a port of 400 Gb/s per GPU",
)
DEVICES = {
    device.name: device
    for device in (
        replace(
            _H100,
            name="a100",
            flops=312e12,
            bandwidth=2.039e12,
            attention=0.64,
            attention_backward=0.56,
            local=_nvlink(300e9),
            network=_port(200e9),
            collectives={},
            float32=19.5e12,
            source="NVIDIA A100 80GB SXM data sheet: 312 TFLOP/s, in float32 19.5, 2.039 TB/s, "
            "NVLink 600 GB/s both ways; DGX A100: a port of 200 Gb/s per GPU",
        ),
        _H100,
        replace(
            _H100,
            name="h100-96",
            memory=95 * GiB,
            bandwidth=2.4e12,
            matmul=_H100.matmul * _AT_500_OF_700_W,
            attention=_H100.attention * _AT_500_OF_700_W,
            attention_backward=_H100.attention_backward * _AT_500_OF_700_W,
            source="the H100 of torchtitan's published runs: 96 GB HBM2e, 2.4 TB/s, limited to "
            "500 W (benchmarks/llama3_h100_202412_torchtitan.md); peak as the H100 SXM",
        ),
        replace(
            _H100,
            name="h200",
            memory=139 * GiB,
            bandwidth=4.8e12,
            source="NVIDIA H200 SXM data sheet: 989 TFLOP/s, 141 GB, 4.8 TB/s",
        ),
        replace(
            _H100,
            name="b200",
            flops=2250e12,
            memory=178 * GiB,
            bandwidth=8e12,
            local=_nvlink(900e9),
            collectives={},
            float32=75e12,
            source="NVIDIA HGX B200 data sheet: 2.25 PFLOP/s dense, in float32 75 TFLOP/s, "
            "180 GB, 8 TB/s, NVLink 1.8 TB/s both ways; a port of 400 Gb/s per GPU",
        ),
    )
}


def device_of(device: Device | str) -> Device:
    """Return a device by its name.

    Raises:
        ValueError: the name is unknown.
    """
    if isinstance(device, Device):
        return device
    known = DEVICES.get(device.lower()) if isinstance(device, str) else None
    if known is None:
        raise ValueError(
            f"unknown device {shortened(str(device))!r}: write one of {', '.join(DEVICES)}, or "
            "pass a Device with its rates and memory"
        )
    return known
