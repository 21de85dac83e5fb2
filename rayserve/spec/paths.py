"""Which paths of a spec lie where? Relative ones are completed with the folder of cluster.yml.

Replicas do not run in the folder in which somebody planned, so a plan holds absolute paths alone. Only
the local profile takes relative ones: its plan is for the machine that it was made on.
"""

from __future__ import annotations

import posixpath
from typing import Any

from rayserve.spec.model import ClusterSpec


def absolute_paths(spec: ClusterSpec, folder: str) -> ClusterSpec:
    """The same spec with every path on the hosts absolute; `folder`: where cluster.yml lies.

    Every `config` stays relative: they are read where the plan is made.
    """

    def full(path: str) -> str:
        return posixpath.normpath(posixpath.join(folder, path)) if path else ""

    def changed(section: Any, key: str) -> Any:
        return section.model_copy(update={key: full(getattr(section, key))})

    candidates = [changed(candidate, "path") for candidate in spec.model.candidates]
    adapters = [changed(adapter, "path") for adapter in spec.lora.adapters]
    return spec.model_copy(
        update={
            "state_dir": full(spec.state_dir),
            "model": changed(spec.model, "path").model_copy(update={"candidates": candidates}),
            "chat": changed(spec.chat, "template_file"),
            "endpoint": changed(spec.endpoint, "api_key_file"),
            "kv_offload": changed(spec.kv_offload, "nvme_dir"),
            "lora": spec.lora.model_copy(update={"adapters": adapters}),
        }
    )
