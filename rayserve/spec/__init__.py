"""What does the person want? `cluster.yml`, read strictly.

text --(documents)--> data and lines --(model)--> ClusterSpec --(rules)--> ClusterSpec
"""

from __future__ import annotations

from rayserve.spec.model import SPEC_KEY, ClusterSpec, NodePool
from rayserve.spec.parse import parse_spec
from rayserve.spec.paths import absolute_paths
from rayserve.spec.rules import serving_pool
from rayserve.spec.words import nearest

__all__ = [
    "SPEC_KEY",
    "ClusterSpec",
    "NodePool",
    "absolute_paths",
    "nearest",
    "parse_spec",
    "serving_pool",
]
