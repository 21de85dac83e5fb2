"""Does the installed vLLM accept every argument of a plan or of a generated Serve config?

    rayserve check args FILE ──> check(FILE) ──> child: python -P -m rayserve.serving.argcheck FILE
                                                   └── vLLM's own create_engine_config()

A child, because importing vLLM takes seconds and gigabytes, and because it may hang or crash. What
vLLM's CPU build accepts says nothing about rules that only the CUDA build has.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from rayserve.errors import EngineArgumentError, HostError, PlanError, RayserveError, Where
from rayserve.inventory import read_yaml
from rayserve.plan import PLAN_KEY, ReplicaPlan
from rayserve.serve_config import IMPORT_PATH
from rayserve.serving.arguments import AppArgs, resolve

TIMEOUT_S = 180.0


def check(path: str) -> dict[str, Any]:
    """The child's verdict as plain data: `{"ok": true, …}` or an error's `as_dict()`.

    Raises:
        HostError: the child ended without a verdict.
    """
    # -P: the folder that this is called from is not one to import from.
    command = [sys.executable, "-P", "-m", "rayserve.serving.argcheck", path]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise HostError(
            f"vLLM's verdict within {TIMEOUT_S:.0f} s",
            found="none",
            do="run `rayserve check install`",
        ) from None
    lines = done.stdout.strip().splitlines()
    if not lines or not lines[-1].startswith("{"):
        raise HostError(
            "a verdict of the installed vLLM",
            found=(done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1],
            do="run `rayserve check install`",
        )
    try:
        verdict: dict[str, Any] = json.loads(lines[-1])
    except ValueError:
        raise HostError(
            "a verdict of the installed vLLM",
            found=lines[-1][:80],
            do="run `rayserve check install`",
        ) from None
    return verdict


def replicas(path: str) -> list[ReplicaPlan]:
    """The replicas that a plan or a Serve config would start, each checked as `build` checks it.

    Raises:
        RayserveError: the file is neither, or what it holds cannot work.
    """
    data = read_yaml(path)
    if isinstance(data, dict) and PLAN_KEY in data:
        return [_lenient(AppArgs(plan=path))]
    listed = data.get("applications") if isinstance(data, dict) else None
    applications = listed if isinstance(listed, list) else []
    entries = [entry for entry in applications if isinstance(entry, dict)]
    ours = [entry for entry in entries if entry.get("import_path") == IMPORT_PATH]
    if not ours:
        raise PlanError(
            f"a plan, or a Serve config with an application of {IMPORT_PATH}",
            found="another document",
            do="write both with `rayserve plan`",
            where=Where(path),
        )
    return [_lenient(AppArgs.model_validate(entry.get("args", {}))) for entry in ours]


def _lenient(args: AppArgs) -> ReplicaPlan:
    return resolve(args, prepared=False).replica


def _ask_vllm(replica: ReplicaPlan) -> dict[str, Any]:
    import os

    os.environ.update({item.name: str(item.value) for item in replica.env})
    from rayserve.serving import engine

    config = engine.engine_config(engine.engine_namespace(replica))
    return {"revision": replica.revision, **engine.engine_facts(config)}


def main(path: str) -> int:
    """The child: print one line of JSON, and end with the error's exit code."""
    import click

    try:
        found = replicas(path)
        print(json.dumps({"ok": True, "replicas": [_ask_vllm(replica) for replica in found]}))
    except RayserveError as error:
        print(json.dumps(error.as_dict()))
        return error.exit_code
    except click.ClickException as error:
        print(json.dumps({"error": "UsageError", "exit_code": 2, "needed": error.message}))
        return 2
    except Exception as error:  # noqa: BLE001 - entry of a process: vLLM raises many kinds
        refused = EngineArgumentError(
            "arguments that the installed vLLM accepts",
            found=" ".join((str(error) or repr(error)).split())[:500],
            do="correct the spec and plan again",
            where=Where(path),
        )
        print(json.dumps(refused.as_dict()))
        return refused.exit_code
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1]))
