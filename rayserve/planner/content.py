"""Which small files define a replica, beside its arguments, and which of them could be read?

Their digests are part of the revision, so that an edited chat template restarts the model like an
edited argument. Reading them is not done here: digests come in, by the path on the hosts.
"""

from __future__ import annotations

from collections.abc import Mapping

from rayserve.plan import NamedValue
from rayserve.planner.support.modelopt import QUANT_CONFIG
from rayserve.spec import ClusterSpec

UNREAD = "Not at hand when this was planned, so a change of its content does not change the revision: {path}"


def model_config_path(spec: ClusterSpec) -> str:
    """The name of the checkpoint's config.json, of which the spec's folder has a copy."""
    return f"{spec.model.path or spec.model.hf_id}/config.json"


def quant_config_path(spec: ClusterSpec) -> str:
    """The name of the checkpoint's hf_quant_config.json, which few have."""
    return f"{spec.model.path or spec.model.hf_id}/{QUANT_CONFIG}"


def host_files(spec: ClusterSpec) -> list[str]:
    """Small files that lie on the hosts alone."""
    template = [spec.chat.template_file] if spec.chat.template_file else []
    return template + [f"{adapter.path}/adapter_config.json" for adapter in spec.lora.adapters]


def content(spec: ClusterSpec, digests: Mapping[str, str]) -> list[NamedValue]:
    """Name and SHA-256 of each file whose digest is known."""
    names = [model_config_path(spec), quant_config_path(spec), *host_files(spec)]
    return [NamedValue(name=name, value=digests[name]) for name in names if name in digests]


def unread(spec: ClusterSpec, digests: Mapping[str, str]) -> list[str]:
    """Notes about the files whose digest is not known."""
    return [UNREAD.format(path=path) for path in host_files(spec) if path not in digests]
