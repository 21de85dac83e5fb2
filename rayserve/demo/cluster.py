"""What does the demo serve? The spec that it writes, and the plan that comes of it.

The same way that everybody goes: cluster.yml → spec → plan → Serve config. The spec is the one in
`inventories/demo`, with this run's paths, port and number of ranks.
"""

from __future__ import annotations

import json
import secrets
from dataclasses import dataclass
from typing import Any

from rayserve.demo import host
from rayserve.demo.workdir import WorkDir
from rayserve.errors import HostError
from rayserve.plan import Plan
from rayserve.serve_config import serve_config

SERVED_NAME = "demo"

CLUSTER_YML = """\
# Written by `rayserve demo`: a tiny model with random weights on vLLM's CPU engine.
rayserve_cluster:
  name: demo
  profile: local
  state_dir: {state_dir}

  node_pools:
    - name: laptop
      hosts: 1
      gpu: cpu
      gpus_per_host: {ranks}           # logical GPUs: `ray start --num-gpus`

  model:
    path: {model}
    served_name: {served_name}
    config: {config}

  sampling:
    temperature: 0.7
    top_p: 0.9
    top_k: 40
  seed: 42

  chat:
    tool_parser: hermes        # the template writes tool calls as this parser reads them

  endpoint:
    port: {port}
    ingress: haproxy
    api_key_file: {keys}

  timeouts:
    start_s: 600
    drain_s: 30
"""


@dataclass(frozen=True)
class Deployment:
    """What is to be deployed, and how clients reach it."""

    plan: Plan
    config: dict[str, Any]
    api_key: str

    @property
    def app(self) -> str:
        """Name of the Serve application."""
        return str(self.config["applications"][0]["name"])

    @property
    def root_url(self) -> str:
        """URL of the application's root, where /health and /metrics are."""
        route = str(self.config["applications"][0]["route_prefix"]).rstrip("/")
        return f"http://127.0.0.1:{self.plan.endpoint.port}{route}"

    @property
    def base_url(self) -> str:
        """What OpenAI clients take as base URL."""
        return f"{self.root_url}/v1"


def prepare(work: WorkDir, *, port: int, ranks: int) -> Deployment:
    """Write cluster.yml, plan.yml, serve.yml and a key for this run.

    Raises:
        InputError: the demo's own spec does not plan: a fault of the toolkit.
        HostError: the folder cannot be written.
    """
    from rayserve import inventory, planning
    from rayserve.planner.render import serve_text

    api_key = "demo-" + secrets.token_urlsafe(24)
    try:
        work.cluster.write_text(cluster_yml(work, port=port, ranks=ranks), "utf-8")
        host.write_private(work.keys, api_key + "\n")
    except OSError as error:
        raise HostError(
            f"to write the demo's files to {work.path}",
            found=error.strerror or str(error),
            do="free some space, or name another folder with --dir",
        ) from error
    files = inventory.locate(str(work.cluster), None)
    planned = planning.make_plan(files)
    config = serve_config(planned.plan)
    texts = planned.texts | {files.serve: serve_text(config, files.spec.name)}
    inventory.write_all(texts)
    return Deployment(planned.plan, config, api_key)


def cluster_yml(work: WorkDir, *, port: int, ranks: int) -> str:
    """The demo's spec as a person would write it. Paths are quoted as JSON, which YAML reads."""
    return CLUSTER_YML.format(
        ranks=ranks,
        port=port,
        served_name=SERVED_NAME,
        state_dir=json.dumps(str(work.path / "state")),
        model=json.dumps(str(work.model)),
        config=json.dumps(str(work.model / "config.json")),
        keys=json.dumps(str(work.keys)),
    )
