"""Which layers does each pipeline stage hold?"""

from __future__ import annotations


def stage_layers(layers: int, pipeline: int) -> tuple[int, ...]:
    """Layers of each pipeline stage (`get_pp_indices` of vllm/distributed/utils.py).

    What does not divide goes to the stages before the last, one each, from the back.
    """
    counts = [layers // pipeline] * pipeline
    for back in range(2, layers % pipeline + 2):
        counts[-back] += 1
    return tuple(counts)


def stage_range(layers: int, pipeline: int, stage: int) -> range:
    """Indices of the layers of one stage."""
    counts = stage_layers(layers, pipeline)
    first = sum(counts[:stage])
    return range(first, first + counts[stage])
