"""Which checkpoint of the model is best served on this hardware, and why?

checkpoints --(compare)--> a plan or an error each --(rank)--> Comparison --(table)--> text
"""

from __future__ import annotations

from rayserve.planner.candidates.compare import Compared, best, compare
from rayserve.planner.candidates.look import Checkpoint
from rayserve.planner.candidates.record import CandidateRow, Comparison, Quality
from rayserve.planner.candidates.table import comparison_text

__all__ = [
    "CandidateRow",
    "Checkpoint",
    "Compared",
    "Comparison",
    "Quality",
    "best",
    "compare",
    "comparison_text",
]
