"""Does `rayserve deploy` bring a real Serve back from a revision that had failed?

Ray and Serve are real; a deployment that starts only once a file exists stands in for the engine
(`tests/engine/repaired_stand_in.py`), since this is about what Serve does with a config.
"""

from __future__ import annotations

import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from rayserve.clients import ServeApi
from rayserve.deploy import deploy
from rayserve.errors import StartError
from tests.ray_cluster import RayCluster, wait_until
from tests.served import make_plan

pytestmark = pytest.mark.engine


def application(name: str, needs: Path) -> dict[str, Any]:
    """The config of one stand-in, under its own route."""
    return {
        "name": name,
        "route_prefix": f"/{name}",
        "import_path": "tests.engine.repaired_stand_in:build",
        "args": {"needs": str(needs)},
    }


def test_after_a_repair_the_same_config_is_tried_anew(tmp_path, monkeypatch):
    """Serve itself ignores it; here it is taken away first, and its neighbour goes on serving."""
    plan = make_plan(tmp_path)
    missing = tmp_path / "missing"
    broken = application(plan.revision, missing)
    beside = application("beside", tmp_path)
    config = {
        "http_options": {"host": "127.0.0.1", "port": plan.endpoint.port},
        "applications": [broken, beside],
    }
    monkeypatch.setattr("rayserve.deploy.serve_config", lambda _plan: config)
    with RayCluster() as cluster:
        api = ServeApi(cluster.dashboard_port, "")

        def neighbour() -> str:
            url = f"http://127.0.0.1:{plan.endpoint.port}/beside"
            with urllib.request.urlopen(url, timeout=10) as reply:
                return str(reply.read().decode())

        with pytest.raises(StartError, match="missing is not there"):
            deploy(plan, api)
        wait_until(lambda: api.status("beside").state == "RUNNING", 60, "the neighbour")
        serves = neighbour()
        missing.touch()
        api.deploy(config)
        time.sleep(5)
        assert api.status(plan.revision).state == "DEPLOY_FAILED"  # this is why it is taken away
        done = deploy(plan, api)
        assert done.app == plan.revision
        assert api.status(plan.revision).has_replica
        assert neighbour() == serves


def test_what_cannot_be_built_takes_nothing_away(tmp_path, monkeypatch):
    """The revision that serves goes on where the next one names what is not there, until one comes that can."""
    plan = make_plan(tmp_path)
    http_options = {"host": "127.0.0.1", "port": plan.endpoint.port}
    old, bad = application("old", tmp_path), application(plan.revision, tmp_path)
    bad["import_path"] = "tests.engine.repaired_stand_in:refuse"
    config = {"http_options": http_options, "applications": [bad]}
    monkeypatch.setattr("rayserve.deploy.serve_config", lambda _plan: config)
    with RayCluster() as cluster:
        api = ServeApi(cluster.dashboard_port, "")
        api.deploy({"http_options": http_options, "applications": [old]})
        wait_until(lambda: api.status("old").has_replica, 60, "the old revision")
        with pytest.raises(StartError, match="no model in"):
            deploy(plan, api)
        wait_until(lambda: not api.status(plan.revision).state, 60, "the refused one gone")
        assert (api.status("old").state, api.status("old").has_replica) == ("RUNNING", True)
        config["applications"] = [application(plan.revision, tmp_path)]
        assert deploy(plan, api).app == plan.revision
        wait_until(lambda: not api.status("old").state, 60, "the old one gone")
