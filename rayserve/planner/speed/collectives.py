"""How long does an all-reduce take between the GPUs of a replica?

Measured, where vLLM's own all-reduce was timed on this GPU: tables of NVIDIA's AIConfigurator
(Apache-2.0; vLLM 0.20, bf16, one host, in a CUDA graph and without). They span the change to NCCL,
which vLLM makes above 8 MiB on the A100 and at smaller messages elsewhere. An earlier campaign
(vLLM 0.14, A100) differs by up to 10 %.

Everywhere else the time is put together from a latency for each hop and the bandwidth of the link,
a guess within a factor that is stated. Between hosts nothing is modelled.
"""

from __future__ import annotations

import math
from bisect import bisect_left

from rayserve.planner.catalogue import Gpu
from rayserve.planner.speed.rooflines import Span
from rayserve.units import MIB

KIB = 1024
SIZES_BYTES = (
    KIB, 32 * KIB, 128 * KIB, 512 * KIB, MIB, 2 * MIB, 4 * MIB, 8 * MIB, 16 * MIB, 64 * MIB,
    256 * MIB,
)  # fmt: skip
"""Message sizes of the columns below."""

_Row = tuple[float, ...]
MEASURED_US: dict[str, dict[int, tuple[_Row, _Row]]] = {
    "A100": {
        2: ((5.0, 5.5, 6.4, 10.7, 15.1, 25.6, 87.0, 128.4, 223.5, 752.8, 2805.9),
            (46.5, 45.9, 45.9, 46.1, 46.4, 46.9, 99.0, 150.1, 262.9, 901.0, 3395.3)),
        4: ((5.2, 6.4, 10.2, 18.1, 26.2, 41.6, 118.4, 182.9, 293.4, 1011.1, 3740.8),
            (46.0, 45.8, 45.7, 45.5, 46.3, 54.1, 125.9, 204.5, 330.0, 1217.8, 4371.0)),
        8: ((5.4, 8.3, 17.1, 21.5, 28.3, 45.5, 141.5, 225.9, 371.4, 1168.5, 4240.7),
            (48.8, 46.2, 47.5, 46.7, 47.3, 57.7, 151.8, 249.2, 408.3, 1322.5, 4843.4)),
    },
    "H100": {
        2: ((4.4, 4.5, 5.2, 8.4, 12.4, 20.2, 44.9, 81.9, 156.5, 468.5, 1677.1),
            (22.3, 22.0, 21.5, 21.7, 21.8, 27.6, 54.4, 97.4, 186.7, 559.4, 2041.9)),
        4: ((4.5, 5.3, 7.1, 12.7, 18.5, 30.4, 53.3, 98.4, 175.3, 619.1, 2308.4),
            (22.5, 22.0, 23.5, 22.1, 25.2, 38.1, 62.0, 113.5, 200.1, 711.7, 2666.5)),
        8: ((4.5, 6.3, 11.5, 15.0, 19.3, 30.7, 50.7, 92.3, 177.7, 575.3, 2110.7),
            (23.8, 23.7, 42.3, 41.8, 42.0, 39.7, 59.8, 107.5, 207.5, 663.3, 2470.7)),
    },
    "H200": {
        2: ((4.5, 4.7, 5.1, 8.3, 12.5, 20.3, 43.0, 76.5, 144.8, 463.3, 1685.5),
            (20.8, 20.4, 20.2, 20.6, 20.5, 27.2, 49.6, 89.9, 167.2, 528.8, 1944.3)),
        4: ((4.6, 5.3, 7.0, 12.0, 17.7, 29.9, 52.0, 93.6, 171.4, 609.3, 2306.1),
            (22.3, 21.5, 21.3, 21.9, 24.1, 37.0, 58.0, 106.4, 190.6, 676.4, 2570.7)),
        8: ((4.8, 6.5, 9.9, 14.1, 18.4, 28.7, 48.6, 87.3, 165.8, 562.7, 2035.7),
            (22.7, 21.7, 39.1, 38.9, 39.7, 39.3, 55.1, 100.4, 196.5, 625.5, 2289.5)),
    },
    "B200": {
        2: ((7.1, 7.3, 7.8, 13.5, 25.7, 34.0, 44.9, 57.1, 86.8, 281.8, 1004.7),
            (19.8, 19.3, 19.3, 20.8, 35.5, 41.6, 46.9, 60.4, 98.2, 322.5, 1171.4)),
        4: ((7.3, 7.7, 8.6, 18.5, 23.7, 29.8, 43.4, 67.2, 123.5, 354.5, 1296.6),
            (20.4, 20.6, 20.4, 25.8, 36.5, 37.1, 50.5, 74.9, 135.7, 398.2, 1465.9)),
        8: ((7.6, 8.6, 25.4, 16.6, 19.9, 26.1, 38.2, 62.3, 110.7, 395.9, 1334.8),
            (20.0, 20.3, 32.9, 36.9, 36.3, 36.1, 44.9, 69.4, 125.6, 428.7, 1504.1)),
    },
}  # fmt: skip
"""Ray label → ranks → (in a CUDA graph, eager) → µs for each of `SIZES_BYTES`. The H100 is the SXM,
the A100 the SXM4-80GB; only GPUs that switches join to eight are looked up here."""
MEASURED_SPREAD = (0.90, 1.10)
"""Between two campaigns on the A100 (vLLM 0.14 and 0.20): up to 10 %."""
EAGER_FLOOR_US = {"A100": 46.0, "H100": 22.5, "H200": 21.5, "B200": 20.0}
"""What the host takes for one all-reduce of a small message without a graph (the tables' eager
rows): the hosts differ more than the GPUs."""
UNKNOWN_FLOOR_US = (20.0, 46.0)
"""Where no host was measured: from the fastest to the slowest of those above."""
HOST_BOUND = 2.0
"""An eager time below so many floors is the host's, not the GPU's."""
HOP_US = {True: (1.0, 4.0), False: (4.0, 12.0)}
"""Assumption: latency of one of a ring's 2 (ranks - 1) hops, with a link and over PCIe."""
LINK_SHARES = {True: (0.30, 0.80), False: (0.25, 0.80)}
"""Assumption: share of the link's bandwidth; low where copies pass through host memory."""


def all_reduce(gpu: Gpu, ranks: int, message_bytes: float, *, graphs: bool) -> Span:
    """Time in ms on the GPUs until all of `ranks` GPUs of one host have the sum of their messages.

    Without a graph the host's time for each call comes on top where the GPU waits for it
    (`call_us`): an eager time near that floor is the host's, so the GPU's is that in a graph.

    The bound is 2 (n - 1) / n x message / bandwidth of the link, which no ring beats; sums within
    the switches (NVLink SHARP) could.
    """
    if ranks <= 1:
        return Span()
    share = 2 * (ranks - 1) / ranks
    wire_ms = share * message_bytes / gpu.peer_gb_s(ranks) / 1e6
    table = _table(gpu, ranks)
    if table is None:
        return _assembled(gpu, ranks, wire_ms)
    low, eager = (_interpolate(row, message_bytes) for row in table)
    waits_for_host = graphs or eager < HOST_BOUND * call_us(gpu)[1]
    high = low if waits_for_host else max(low, eager)
    low_ms, high_ms = low * MEASURED_SPREAD[0] / 1e3, high * MEASURED_SPREAD[1] / 1e3
    return Span(min(wire_ms, low_ms), low_ms, high_ms)


def measured(gpu: Gpu, ranks: int) -> bool:
    """Somebody timed vLLM's all-reduce between that many GPUs of this model."""
    return ranks <= 1 or _table(gpu, ranks) is not None


def call_us(gpu: Gpu) -> tuple[float, float]:
    """Time (low, high) in µs that the host takes for one call of an all-reduce without a graph."""
    floor = EAGER_FLOOR_US.get(gpu.label)
    return (floor, floor) if floor is not None else UNKNOWN_FLOOR_US


def hop(gpu: Gpu, message_bytes: float) -> Span:
    """Time in ms to hand a message to the next pipeline stage, on the same host (assumption)."""
    linked = gpu.linked_gpus > 1
    low_us, high_us = HOP_US[linked]
    low_share, high_share = LINK_SHARES[linked]
    wire_ms = message_bytes / gpu.peer_gb_s(2) / 1e6
    return Span(wire_ms, wire_ms / high_share + low_us / 1e3, wire_ms / low_share + high_us / 1e3)


def _table(gpu: Gpu, ranks: int) -> tuple[_Row, _Row] | None:
    """The rows of (graph, eager) for this GPU; None where nobody measured."""
    if gpu.linked_gpus < max(MEASURED_US["A100"]):
        return None
    return MEASURED_US.get(gpu.label, {}).get(ranks)


def _assembled(gpu: Gpu, ranks: int, wire_ms: float) -> Span:
    linked = gpu.linked(ranks)
    hops = 2 * (ranks - 1)
    low_us, high_us = HOP_US[linked]
    low_share, high_share = LINK_SHARES[linked]
    low = hops * low_us / 1e3 + wire_ms / high_share
    return Span(wire_ms, low, hops * high_us / 1e3 + wire_ms / low_share)


def _interpolate(row: _Row, message_bytes: float) -> float:
    """The time between the measured sizes, on logarithmic scales; in proportion beyond the last."""
    if message_bytes <= SIZES_BYTES[0]:
        return row[0]
    if message_bytes >= SIZES_BYTES[-1]:
        return row[-1] * message_bytes / SIZES_BYTES[-1]
    right = bisect_left(SIZES_BYTES, message_bytes)
    left = right - 1
    part = math.log(message_bytes / SIZES_BYTES[left])
    part /= math.log(SIZES_BYTES[right] / SIZES_BYTES[left])
    return math.exp((1 - part) * math.log(row[left]) + part * math.log(row[right]))
