"""What does the person want? `cluster.yml`, read strictly.

text --(documents)--> data and lines --(model)--> ClusterSpec --(rules)--> ClusterSpec
"""

from __future__ import annotations

from rayserve.spec.base import COMMIT
from rayserve.spec.checkpoint_rules import SERVED, picks
from rayserve.spec.model import SPEC_KEY, ClusterSpec, NodePool
from rayserve.spec.parse import parse_spec
from rayserve.spec.paths import absolute_paths
from rayserve.spec.rules import serving_pool
from rayserve.spec.words import nearest

__all__ = [
    "COMMIT",
    "SERVED",
    "SPEC_KEY",
    "ClusterSpec",
    "NodePool",
    "absolute_paths",
    "nearest",
    "parse_spec",
    "picks",
    "serving_pool",
]
