"""What must hold where a replica starts: its environment, its whole gang, and no door without keys."""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Callable, Mapping
from ipaddress import ip_address
from typing import Literal

from pydantic import ValidationError

from rayserve.documents import brief
from rayserve.errors import HostError, PlanError
from rayserve.keyfile import read_keys
from rayserve.plan import LivePlan, NamedValue, Placement
from rayserve.serve_config import HAPROXY_SWITCH, missing_environment

logger = logging.getLogger("ray.serve")


def check_environment(required: list[NamedValue], profile: Literal["local", "production"]) -> None:
    """In production this Ray node must have the plan's environment; elsewhere its lack is logged.

    Serve's controller and proxies read theirs on their own nodes, which a replica cannot see:
    roles set the same on all.

    Raises:
        HostError: a production replica on a node that lacks a part of it.
    """
    missing = missing_environment(required, os.environ)
    if profile == "production" and (missing or not required):
        raise HostError(
            "the environment of a production start on this Ray node",
            found="missing " + (" ".join(missing) or "all of it in the Serve config"),
            do="start Ray on every node with what `rayserve env <plan.yml>` prints",
        )
    if missing:
        logger.warning("this Ray node lacks %s: Serve's own timers apply", " ".join(missing))


def check_gang(placement: Placement) -> None:
    """A replica on one host must hold exactly its GPUs, or vLLM would share somebody else's.

    Raises:
        HostError: it holds more or fewer.
    """
    if placement.executor != "mp" or "GPU" not in placement.bundles[0]:
        return
    import ray

    held = len(ray.get_gpu_ids())
    if held != placement.gpus:
        raise HostError(
            f"{placement.gpus} GPUs held by this replica",
            found=str(held),
            do="deploy the generated Serve config, which asks for the whole gang in one bundle",
        )


def check_stages(placement: Placement) -> None:
    """Across hosts, each pipeline stage must sit whole on one host: its all-reduce uses NVLink.

    vLLM orders its ranks by node, so a stage is whole exactly when each node holds a multiple of
    tensor_parallel_size bundles.

    Raises:
        HostError: a stage is split.
    """
    if placement.executor != "ray":
        return
    import ray

    group = ray.util.get_current_placement_group()
    nodes = Counter(ray.util.placement_group_table(group)["bundles_to_node_id"].values())
    split = [count for count in nodes.values() if count % placement.tensor_parallel_size]
    if split:
        raise HostError(
            f"a multiple of {placement.tensor_parallel_size} GPUs of this replica on each host",
            found=f"{sorted(nodes.values())} GPUs on {len(nodes)} hosts",
            do="free whole hosts for this replica; a stage split over hosts is slower than useful",
        )


def check_limits(limits: object, profile: Literal["local", "production"]) -> None:
    """The first limits of a replica must be usable before its engine starts.

    Args:
        limits: Serve's `user_config` of the deployment.
        profile: the plan's.

    Raises:
        PlanError: something else than limits.
        HostError: the key file cannot be used on this host, or there is none where one is needed.
    """
    key_file = read_limits(limits).door.api_key_file
    check_keys(key_file, profile, os.environ, serve_host)
    if key_file:
        read_keys(key_file)


def read_limits(limits: object) -> LivePlan:
    """The limits in Serve's `user_config`.

    Raises:
        PlanError: something else than limits.
    """
    try:
        return LivePlan.model_validate(limits)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        key = ".".join(str(part) for part in ("user_config", *first["loc"]))
        raise PlanError(
            f"the limits of a plan in `{key}`: {first['msg']}",
            found=brief(first["input"]),
            do="deploy the Serve config that `rayserve plan` wrote; it is not edited by hand",
        ) from None


def check_keys(
    api_key_file: str,
    profile: Literal["local", "production"],
    environ: Mapping[str, str],
    bound_host: Callable[[], str],
) -> None:
    """A door without keys is only for a local plan behind Serve's own proxy on loopback.

    Args:
        api_key_file: the door's key file; empty: no keys.
        profile: the plan's.
        environ: environment of a Serve process.
        bound_host: asked for the address that Serve's proxies listen on, where it decides.

    Raises:
        HostError: anything else without keys.
    """
    if api_key_file:
        return
    found = ""
    if profile != "local":
        found = f"none, in a plan of profile {profile}"
    elif environ.get(HAPROXY_SWITCH) == "1":
        found = f"none, and {HAPROXY_SWITCH}=1, whose ports on each replica are open to the network"
    elif not _is_loopback(host := bound_host()):
        found = f"none, and Serve listens on {host}"
    if found:
        raise HostError(
            "an API key file",
            found=found,
            do="set endpoint.api_key_file and plan again; without keys only `profile: local` runs, "
            "through Serve's own proxy on 127.0.0.1",
        )


def serve_host() -> str:
    """The address that the running Serve's proxies bind."""
    from ray.serve.context import _get_global_client

    client = _get_global_client()
    return str(client.http_config.host or "0.0.0.0")


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False
