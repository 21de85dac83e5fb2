"""Which combinations of well-formed values cannot work? Pure rules over a spec, first problem first."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from rayserve.documents import Loc
from rayserve.ports import taken_by
from rayserve.spec.base import HF_ID
from rayserve.spec.checkpoint_rules import candidates_rule, model_rule, moving, revision_form
from rayserve.spec.model import ClusterSpec, NodePool
from rayserve.spec.problem import CLOUD_SCHEMES, Problem

KEY_FILE = "/etc/rayserve/api_keys"
"""Where the roles put the keys."""
LOOPBACK = {"127.0.0.1", "localhost", "::1"}
UNDESCRIBED = "medusa"
"""The method whose draft model has heads alone: its config.json describes no layers."""
DRAFT_METHODS = {"draft_model", "eagle", "eagle3", "medusa"}


def first_problem(spec: ClusterSpec) -> Problem | None:
    """The first broken rule, or None."""
    return next((problem for rule in RULES for problem in rule(spec)), None)


def serving_pool(spec: ClusterSpec) -> NodePool:
    """The node pool that carries the replicas. The rules make sure that there is exactly one."""
    name = spec.replicas.pool
    return next(p for p in spec.node_pools if (p.name == name if name else p.gpus_per_host > 0))


def _pools(spec: ClusterSpec) -> Iterator[Problem]:
    names = [pool.name for pool in spec.node_pools]
    for index, pool in enumerate(spec.node_pools):
        at: Loc = ("node_pools", index)
        if names.index(pool.name) != index:
            yield Problem(
                (*at, "name"), "pool names that differ", f"`{pool.name}` twice", "rename one"
            )
        if pool.gpus_per_host and not pool.gpu:
            yield Problem(
                (*at, "gpus_per_host"),
                f"`gpu` beside gpus_per_host: {pool.gpus_per_host}",
                "nothing",
                "add `gpu`, such as A100-80GB-SXM, or `cpu`",
            )
        if pool.gpu and not pool.gpus_per_host:
            yield Problem(
                (*at, "gpu"),
                f"`gpus_per_host` beside gpu: {pool.gpu}",
                "nothing",
                "add `gpus_per_host: 8`, or remove `gpu`",
            )
    with_gpus = [pool.name for pool in spec.node_pools if pool.gpus_per_host]
    chosen = spec.replicas.pool
    if not with_gpus:
        yield Problem(
            ("node_pools",), "a pool with GPUs", "none", "give one pool `gpu` and `gpus_per_host`"
        )
    elif chosen and chosen not in with_gpus:
        yield Problem(
            ("replicas", "pool"),
            "the name of a pool with GPUs",
            f"`{chosen}`",
            f"write one of: {', '.join(with_gpus)}",
        )
    elif not chosen and len(with_gpus) > 1:
        yield Problem(
            ("replicas",),
            "`replicas.pool`, since several pools have GPUs",
            "nothing",
            f"add `pool: {with_gpus[0]}`, or another of {', '.join(with_gpus)}",
        )


def _paths(spec: ClusterSpec) -> Iterator[Problem]:
    named: list[tuple[Loc, str]] = [
        (("model", "path"), spec.model.path),
        (("chat", "template_file"), spec.chat.template_file),
        (("endpoint", "api_key_file"), spec.endpoint.api_key_file),
        (("kv_offload", "nvme_dir"), spec.kv_offload.nvme_dir),
        (("state_dir",), spec.state_dir),
        *(
            (("model", "candidates", index, "path"), candidate.path)
            for index, candidate in enumerate(spec.model.candidates)
        ),
    ]
    adapters: list[tuple[Loc, str]] = [
        (("lora", "adapters", index, "path"), adapter.path)
        for index, adapter in enumerate(spec.lora.adapters)
    ]
    for loc, path in adapters:
        if path.startswith(CLOUD_SCHEMES):
            yield Problem(
                loc,
                "a folder on every host's disk",
                path,
                "copy the adapter there, and write the folder",
            )
    for loc, path in [*named, *adapters]:
        if "\n" in path or "{" in path:
            yield Problem(
                loc,
                "the path of a file",
                "text that is not a path",
                "write the template to a file, and its path here",
            )
        if path.startswith("~"):
            yield Problem(
                loc,
                "a path without ~, which means another folder to each user",
                path,
                "write the folder in full",
            )
        if path and spec.profile == "production" and not path.startswith("/"):
            is_file = loc == ("endpoint", "api_key_file")
            yield Problem(
                loc,
                "an absolute path, since hosts share no working folder",
                "a relative one, or a key, and not repeated here" if is_file else path,
                f"put the keys in a file on every host, one a line, and write its path: {KEY_FILE}"
                if is_file
                else f"write /…/{path.lstrip('./')}, or `profile: local`",
            )


def _limits(spec: ClusterSpec) -> Iterator[Problem]:
    limits = spec.limits
    step, seqs, length = limits.max_num_batched_tokens, limits.max_num_seqs, limits.max_model_len
    if isinstance(step, int) and isinstance(seqs, int) and step < seqs:
        yield Problem(
            ("limits", "max_num_batched_tokens"),
            f"at least max_num_seqs ({seqs})",
            str(step),
            f"write {max(seqs, 2048)}, or auto",
        )
    holds_prompt = isinstance(step, str) or (isinstance(length, int) and step >= length)
    if not spec.scheduling.chunked_prefill and not holds_prompt:
        yield Problem(
            ("limits", "max_num_batched_tokens"),
            "a step that holds the longest prompt, since chunked_prefill is false",
            f"{step} tokens for max_model_len {length}",
            "write auto, or `chunked_prefill: true`",
        )
    work = spec.workload
    whole = work.prompt_tokens + work.output_tokens
    if isinstance(length, int) and whole > length and "workload" in spec.model_fields_set:
        yield Problem(
            ("workload",),
            f"prompt_tokens and output_tokens of at most max_model_len ({length}) together",
            str(whole),
            "lower them, or raise limits.max_model_len",
        )
    largest = spec.door.max_tokens
    if isinstance(largest, int) and isinstance(length, int) and largest > length:
        yield Problem(
            ("door", "max_tokens"),
            f"at most max_model_len ({length})",
            str(largest),
            f"write {length}, or auto",
        )


def _replicas(spec: ClusterSpec) -> Iterator[Problem]:
    if spec.replicas.max < spec.replicas.min:
        yield Problem(
            ("replicas", "max"),
            f"max of at least min ({spec.replicas.min})",
            str(spec.replicas.max),
            f"write {spec.replicas.min}",
        )


def _endpoint(spec: ClusterSpec) -> Iterator[Problem]:
    endpoint = spec.endpoint
    at = ("endpoint",)
    if spec.profile == "production":
        yield from _production_endpoint(spec)
    elif not endpoint.api_key_file and endpoint.ingress == "haproxy":
        yield Problem(
            (*at, "ingress"),
            "`endpoint.api_key_file`, without which no replica starts behind HAProxy",
            "no key file",
            "add api_key_file; or, on a laptop, `ingress: proxy`",
        )
    elif not endpoint.api_key_file and endpoint.host and endpoint.host not in LOOPBACK:
        yield Problem(
            (*at, "host"),
            "127.0.0.1 where there is no key file",
            endpoint.host,
            "write 127.0.0.1, or add api_key_file",
        )
    yield from _haproxy_host(spec)
    if taken := taken_by(endpoint.port):
        yield Problem((*at, "port"), "a port of its own", f"{endpoint.port}, {taken}", "write 8000")


def _production_endpoint(spec: ClusterSpec) -> Iterator[Problem]:
    """Both keys that production must write out, in one message where both are missing."""
    endpoint = spec.endpoint
    hosts = sum(pool.hosts for pool in spec.node_pools)
    advised = {
        "host": "`host: 0.0.0.0` behind a firewall"
        if hosts > 1
        else "`host: 127.0.0.1` if the gateway is on this host, else 0.0.0.0 behind a firewall",
        "api_key_file": f"`api_key_file: {KEY_FILE}`, a file on every host with one key a line",
    }
    missing = [key for key in advised if not getattr(endpoint, key)]
    if missing:
        yield Problem(
            ("endpoint",),
            " and ".join(f"`endpoint.{key}`" for key in missing) + " in production",
            "neither" if len(missing) > 1 else "nothing",
            "add " + "; and ".join(advised[key] for key in missing),
        )


def _haproxy_host(spec: ClusterSpec) -> Iterator[Problem]:
    """Replicas bind http_options.host too; HAProxy reaches those of its own host by loopback, those
    of others by their address (ray/serve/_private/replica.py, haproxy.py:_target_to_server).
    """
    host = spec.endpoint.host or "127.0.0.1"
    if spec.endpoint.ingress != "haproxy" or host == "0.0.0.0":
        return
    hosts = sum(pool.hosts for pool in spec.node_pools)
    if host != "127.0.0.1":
        yield Problem(
            ("endpoint", "host"),
            "127.0.0.1 or 0.0.0.0 with HAProxy, which reaches the replicas of its host by loopback",
            host,
            "write 0.0.0.0 and keep the firewall, or use `ingress: proxy`",
        )
    elif hosts > 1:
        yield Problem(
            ("endpoint", "host"),
            f"0.0.0.0, so that HAProxy reaches replicas on the other of {hosts} hosts",
            host,
            "write 0.0.0.0 and keep the firewall",
        )


def _features(spec: ClusterSpec) -> Iterator[Problem]:
    if spec.kv_offload.nvme_dir and not spec.kv_offload.cpu_gib:
        yield Problem(
            ("kv_offload", "nvme_dir"),
            "`kv_offload.cpu_gib`, the tier above the disk",
            "0",
            "add cpu_gib; blocks reach the disk through it",
        )
    names = [spec.model.served_name]
    for index, adapter in enumerate(spec.lora.adapters):
        if adapter.name in names:
            yield Problem(
                ("lora", "adapters", index, "name"),
                "a name that is not taken",
                f"`{adapter.name}` again",
                "rename the adapter",
            )
        names.append(adapter.name)
    yield from _speculative(spec)
    if not spec.scheduling.prefix_caching and spec.kv_offload.cpu_gib:
        yield Problem(
            ("kv_offload", "cpu_gib"),
            "prefix_caching, which offloading builds on",
            "prefix_caching: false",
            "write `prefix_caching: true`, or cpu_gib: 0",
        )


def _speculative(spec: ClusterSpec) -> Iterator[Problem]:
    guess = spec.speculative
    if guess is None:
        return
    if (guess.method in DRAFT_METHODS) != bool(guess.model):
        wants = "a" if guess.method in DRAFT_METHODS else "no"
        yield Problem(
            ("speculative",),
            f"{wants} `model` with method {guess.method}",
            guess.model or "none",
            "add it" if wants == "a" else "remove it",
        )
    elif guess.model and not re.match(f"/|{HF_ID}", guess.model):
        yield Problem(
            ("speculative", "model"),
            "an absolute folder, or a Hugging Face id",
            guess.model,
            "write /…/folder, or organisation/name",
        )
    if guess.config and not guess.model:
        yield Problem(
            ("speculative", "config"),
            f"no `config` with method {guess.method}, which has no model of its own",
            guess.config,
            "remove it",
        )
    if guess.revision and not guess.from_hub:
        yield Problem(
            ("speculative", "revision"),
            "`revision` only where `speculative.model` is an id",
            f"model: {guess.model or 'none'}",
            "remove `revision`; a folder has none",
        )
    if guess.from_hub and not guess.revision and spec.profile == "production":
        yield Problem(
            ("speculative", "model"),
            "`speculative.revision` beside an id in production",
            "nothing",
            "add the commit hash, so that every host loads the same weights",
        )
    unfetched = guess.from_hub and (guess.config or guess.method == UNDESCRIBED)
    yield from revision_form(("speculative", "revision"), guess.revision)
    if unfetched and moving(spec, guess.revision):
        yield Problem(
            ("speculative", "revision"),
            "a commit of 40 hexadecimal digits where the plan does not fetch the draft model's "
            "config.json: only then it pins a branch",
            guess.revision,
            "write the commit hash, so that every host loads the same weights",
        )


def _cpu(spec: ClusterSpec) -> Iterator[Problem]:
    if serving_pool(spec).gpu != "cpu":
        return
    if spec.kv_offload.cpu_gib:
        yield Problem(
            ("kv_offload", "cpu_gib"),
            "a GPU pool",
            "gpu: cpu",
            "remove kv_offload; the CPU engine refuses it",
        )
    if spec.scheduling.cuda_graphs is True:
        yield Problem(
            ("scheduling", "cuda_graphs"),
            "a GPU pool",
            "gpu: cpu",
            "write auto, or leave the key out",
        )


def _timeouts(spec: ClusterSpec) -> Iterator[Problem]:
    times = spec.timeouts
    if times.health_timeout_s >= times.stall_s:
        yield Problem(
            ("timeouts", "stall_s"),
            f"more than health_timeout_s ({times.health_timeout_s:g})",
            f"{times.stall_s:g}",
            "raise stall_s: a slow check is not a stall",
        )
    if times.stall_s >= times.start_s:
        yield Problem(
            ("timeouts", "start_s"),
            f"more than stall_s ({times.stall_s:g})",
            f"{times.start_s:g}",
            "write 1800 for a large model",
        )


RULES: tuple[Callable[[ClusterSpec], Iterator[Problem]], ...] = (
    _pools,
    model_rule,
    candidates_rule,
    _paths,
    _limits,
    _replicas,
    _endpoint,
    _features,
    _cpu,
    _timeouts,
)
