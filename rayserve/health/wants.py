"""What does a plan ask of a host of its serving pool?"""

from __future__ import annotations

from rayserve import ports
from rayserve.health.checks.wanted import LINK_GB_S, Wanted
from rayserve.plan import Plan
from rayserve.planner.catalogue import gpus
from rayserve.units import MIB

RAY_PORTS = (ports.RAY["gcs"], ports.RAY["dashboard"])
"""Of Ray's GCS and dashboard, on the head."""
HAPROXY_PORTS = (ports.HAPROXY_STATISTICS, ports.HAPROXY_METRICS)
"""Of the statistics and metrics of Serve's HAProxy, on every host with a replica."""


def wanted_of(plan: Plan) -> Wanted:
    """The plan's serving pool as a host must be; without GPUs for the CPU engine."""
    pool = next((pool for pool in plan.node_pools if pool.gpu in gpus()), None)
    gpu = gpus()[pool.gpu] if pool is not None else None
    count = pool.gpus_per_host if pool is not None else 0
    linked = gpu is not None and count > 1 and gpu.linked(count)
    link_gb_s = gpu.link_gb_s if gpu is not None and linked else 0.0
    one_gb_s = LINK_GB_S.get(gpu.compute_capability, 0.0) if gpu is not None else 0.0
    replica = plan.replica
    return Wanted(
        gpus=count,
        model=gpu.name if gpu is not None else "",
        label=gpu.label if gpu is not None else "",
        memory_mib=gpu.memory_bytes // MIB if gpu is not None else 0,
        link_gb_s=link_gb_s / 2,
        links=round(link_gb_s / one_gb_s) if one_gb_s else 0,
        ports=_ports(plan),
        model_path=replica.model if replica.model_source == "path" else "",
        offload_dir=_offload_dir(replica.engine_arguments().get("kv_transfer_config")),
        key_file=plan.door.api_key_file,
        token=any(one.name == "RAY_AUTH_MODE" and one.value == "token" for one in plan.environment),
        host=plan.endpoint.host,
        port=plan.endpoint.port,
        route=f"/{plan.revision}",
        without_gpus=next((one.name for one in plan.node_pools if not one.gpus_per_host), ""),
    )


def _ports(plan: Plan) -> tuple[int, ...]:
    """Ports that Ray, Serve and its HAProxy listen on."""
    haproxy = HAPROXY_PORTS if plan.endpoint.ingress == "haproxy" else ()
    return (*RAY_PORTS, plan.endpoint.port, *haproxy)


def _offload_dir(transfer: object) -> str:
    """Folder of the KV cache's disk tier in vLLM's `kv_transfer_config`; empty: none."""
    extra = transfer.get("kv_connector_extra_config") if isinstance(transfer, dict) else None
    tiers = extra.get("secondary_tiers") if isinstance(extra, dict) else None
    folders = [str(tier.get("root_dir", "")) for tier in tiers or () if isinstance(tier, dict)]
    return folders[0] if folders else ""
