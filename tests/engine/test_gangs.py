"""Does a replica get its whole gang: eight ranks of a real engine on one host, and stages unsplit on two?"""

from __future__ import annotations

import json
import tempfile
import urllib.request
from pathlib import Path

import pytest

from rayserve.plan import Placement
from rayserve.starts import LEDGER
from tests.ray_cluster import RayCluster, wait_until
from tests.served import Served, endpoint_port, make_plan

TWO_STAGES = Placement(
    tensor_parallel_size=2,
    pipeline_parallel_size=2,
    strategy="PACK",
    bundles=[{"GPU": 1}] * 4,
    executor="ray",
)


@pytest.fixture
def folder():
    """A short path: HAProxy's sockets lie in it."""
    with tempfile.TemporaryDirectory(prefix="rse-", dir="/tmp") as name:
        yield Path(name)


def test_eight_ranks_in_one_gang_answer_through_serve(folder):
    """TP=8 in a placement group of 8 logical GPUs: a chat completion from eight real CPU ranks."""
    pool = {"name": "local", "hosts": 1, "gpu": "cpu", "gpus_per_host": 8}
    plan = make_plan(folder, node_pools=[pool])
    assert plan.replica.placement.bundles == [{"GPU": 8}]
    with Served(plan, folder) as served:
        groups = served.ray.placement_groups()
        assert [group["state"] for group in groups] == ["CREATED"]
        body = {
            "model": served.model,
            "messages": [{"role": "user", "content": "Which rank are you?"}],
            "max_tokens": 8,
        }
        request = urllib.request.Request(
            f"{served.url}/v1/chat/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json", **served.headers},
        )
        with urllib.request.urlopen(request, timeout=120) as reply:
            answer = json.load(reply)
        assert answer["usage"]["completion_tokens"] == 8
        start = json.loads((folder / "state" / LEDGER).read_text())
        assert [rank["rank"] for rank in start["memory"]] == list(range(8))
        assert {"import", "config", "weights", "profile", "warm-up"} <= set(start["phases_s"])


def _deploy_gang(cluster: RayCluster, placement: Placement) -> str:
    """Deploy a stand-in that checks its gang as a replica does; the application's end status.

    vLLM's CPU platform refuses the Ray executor (tests/contract/test_seams.py), so the engine
    cannot run here: this shows where Serve puts the gang, and what the replica says to it.
    """
    application = {
        "name": "gang",
        "route_prefix": "/gang",
        "import_path": "tests.engine.gang_stand_in:build",
        "args": {"placement": placement.model_dump(mode="json")},
    }
    # Serve's own default is one fixed port, which another Serve on this machine may have.
    cluster.deploy({"http_options": {"port": endpoint_port()}, "applications": [application]})

    def ended() -> str | None:
        found = cluster.serve_status()["applications"].get("gang", {})
        status = found.get("status", "")
        if status == "DEPLOY_FAILED":
            return f"{status} {json.dumps(found['deployments'])} {found['message']}"
        return status if status == "RUNNING" else None

    return str(wait_until(ended, 60, "the stand-in's deployment"))


def test_pipeline_stages_across_two_nodes_stay_whole():
    """TP=2 x PP=2 over two nodes of two GPUs: each stage sits on one node, and the replica agrees."""
    with RayCluster(num_gpus=2, num_cpus=4) as cluster:
        cluster.add_node(num_gpus=2)
        assert _deploy_gang(cluster, TWO_STAGES) == "RUNNING"
        (group,) = cluster.placement_groups()
        assert group["state"] == "CREATED"
        assert len(group["bundles"]) == 4


def test_a_stage_that_is_split_over_nodes_is_refused():
    """Nodes of 3 and 1 GPUs could hold four ranks, but one stage would cross the network."""
    with RayCluster(num_gpus=3, num_cpus=4) as cluster:
        cluster.add_node(num_gpus=1)
        status = _deploy_gang(cluster, TWO_STAGES)
        assert status.startswith("DEPLOY_FAILED")
        assert "a multiple of 2 GPUs of this replica on each host" in status


def test_a_gang_of_another_size_than_planned_is_refused():
    """A config edited by hand that asks for one GPU too few: vLLM would use one that others hold."""
    planned = Placement(
        tensor_parallel_size=2,
        pipeline_parallel_size=1,
        strategy="STRICT_PACK",
        bundles=[{"GPU": 1}],
        executor="mp",
    )
    with RayCluster(num_gpus=2, num_cpus=4) as cluster:
        status = _deploy_gang(cluster, planned)
        assert status.startswith("DEPLOY_FAILED")
        assert "2 GPUs held by this replica" in status
