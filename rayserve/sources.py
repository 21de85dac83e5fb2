"""Where do the small files of a checkpoint come from, and what do they say?

`config` beside cluster.yml; else, for an id, the model hub or this machine's cache of it. What cannot be
read here, because it lies on the hosts, stays as the plan on disk has it.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rayserve.documents import brief
from rayserve.errors import HostError, SpecError
from rayserve.files import CONFIG, read_bytes, read_checkpoint, read_config
from rayserve.inventory import MAX_BYTES
from rayserve.plan import Plan
from rayserve.planner.catalogue import CPU
from rayserve.planner.content import host_files, model_config_path, quant_config_path
from rayserve.planner.support.modelopt import QUANT_CONFIG, wants_quant_config
from rayserve.spec import COMMIT, ClusterSpec, serving_pool
from rayserve.spec.rules import UNDESCRIBED

if TYPE_CHECKING:
    from rayserve.hub import Hub, Snapshot

NUMBERS = ("HF_HUB_ETAG_TIMEOUT", "HF_HUB_DOWNLOAD_TIMEOUT")


@dataclass(frozen=True)
class Source:
    """What was read of one checkpoint."""

    spec: ClusterSpec
    """With the commit that was read, where it is an id without `config`."""
    config: Mapping[str, Any] | None
    """Content of config.json, with a quantization that stands beside it; None: there is no such file."""
    digests: Mapping[str, str]
    """SHA-256 of the small files that define a replica, by their path on the hosts."""
    stored: Mapping[str, int]
    """Bytes of the checkpoint's tensors by type; empty: not known."""


class Sources:
    """The checkpoints of one spec."""

    def __init__(
        self,
        spec: ClusterSpec,
        folder: Path,
        *,
        before: Plan | None,
        unchanged: bool,
        say: Callable[[str], None],
    ) -> None:
        """What there is.

        Args:
            spec: with all its candidates.
            folder: where cluster.yml lies.
            before: the plan on disk.
            unchanged: whether that is of this very spec.
            say: takes a line of progress.
        """
        self._folder, self._before, self._unchanged = folder, before, unchanged
        self._say = say
        models = [spec.model, *spec.model.candidates]
        self._ids = [model.hf_id for model in models if model.hf_id]
        self._hub: Hub | None = None
        self._known: dict[str, Source] = {}

    def drafted(self, spec: ClusterSpec) -> tuple[ClusterSpec, Mapping[str, Any] | None]:
        """The spec with the commit of its draft model, and what its config.json says; None: not known.

        Raises:
            SpecError, HostError: as `read`.
        """
        guess = spec.speculative
        if guess is None or not guess.model:
            return spec, None
        if guess.config:
            named = spec.where("speculative", "config")
            return spec, read_config(self._folder / guess.config, named)
        if not guess.from_hub or guess.method == UNDESCRIBED:
            return spec, None
        revision = guess.revision
        if not COMMIT.fullmatch(revision):
            revision = self._planned_draft(guess.model) or revision
        snapshot = self._open_hub().snapshot(
            guess.model, revision, spec.where("speculative", "model")
        )
        pinned = guess.model_copy(update={"revision": snapshot.commit})
        spec = spec.model_copy(update={"speculative": pinned})
        return spec, self._fetched_config(snapshot)

    def read(self, spec: ClusterSpec) -> Source:
        """The files of the checkpoint that `spec.model` names, each read once.

        Raises:
            SpecError: one cannot be read, or is not what it should be; there is no such id or revision.
            HostError: the hub cannot be reached or read.
        """
        name = spec.model.model_dump_json()
        if name not in self._known:
            spec, place, snapshot = self._placed(spec)
            config = self._read_config(spec, place, snapshot)
            digests = self._digests(spec, place)
            stored = self._stored(spec, place.parent, digests, snapshot)
            self._known[name] = Source(spec, config, digests, stored)
        return self._known[name]

    def _placed(self, spec: ClusterSpec) -> tuple[ClusterSpec, Path, Snapshot | None]:
        """The spec with the commit that is read, config.json, and what it is a file of."""
        if not spec.model.hf_id or spec.model.config:
            return spec, self._folder / spec.model.config, None
        snapshot = self._snapshot(spec)
        model = spec.model.model_copy(update={"revision": snapshot.commit})
        return spec.model_copy(update={"model": model}), snapshot.folder / CONFIG, snapshot

    def _read_config(
        self, spec: ClusterSpec, place: Path, snapshot: Snapshot | None
    ) -> Mapping[str, Any] | None:
        if snapshot is not None:
            return self._fetched_config(snapshot)
        config = read_config(place, spec.where("model", "config"))
        if config is not None and wants_quant_config(config):
            self._check_beside(spec, place)
        return config

    def _fetched_config(self, snapshot: Snapshot) -> Mapping[str, Any] | None:
        place = snapshot.folder / CONFIG
        config = read_config(place)
        wants = config is not None and wants_quant_config(config)
        if wants and self._open_hub().optional(snapshot, QUANT_CONFIG):
            return read_config(place)
        return config

    # ── the hub ───────────────────────────────────────────────────────────────────────────────────
    def _open_hub(self) -> Hub:
        if self._hub is None:
            try:
                from rayserve.hub import Hub  # noqa: PLC0415 - it takes a second
            except ImportError as error:
                raise HostError(
                    "the package huggingface_hub, to fetch config.json of an `hf_id`",
                    found=f"no {error.name}",
                    do="install it (pip install 'huggingface_hub>=2.4,<3'), or copy config.json of "
                    "the checkpoint here and name it in `config`",
                ) from None
            except ValueError:  # it reads its numbers as it is imported
                raise HostError(
                    "environment variables that huggingface_hub can read",
                    found=_no_number() or "one that it cannot read",
                    do="correct or unset it",
                ) from None
            self._hub = Hub(self._say)
        return self._hub

    def _snapshot(self, spec: ClusterSpec) -> Snapshot:
        model = spec.model
        revision = model.revision
        if not COMMIT.fullmatch(revision):
            revision = self._planned_commit(model.hf_id) or revision
        return self._open_hub().snapshot(model.hf_id, revision, spec.where("model", "hf_id"))

    def _planned_commit(self, hf_id: str) -> str:
        """The commit of the plan on disk: while cluster.yml is the same, it is planned again."""
        before = self._before
        if before is None or not self._unchanged or before.replica.model != hf_id:
            return ""
        if self._ids.count(hf_id) > 1:  # which of them it was of is not known
            return ""
        return _commit_of(before)

    def _planned_draft(self, hf_id: str) -> str:
        """As `_planned_commit`, of the draft model."""
        if self._before is None or not self._unchanged:
            return ""
        guess = self._before.replica.engine_arguments().get("speculative_config")
        if not isinstance(guess, Mapping) or guess.get("model") != hf_id:
            return ""
        commit = str(guess.get("revision", ""))
        return commit if COMMIT.fullmatch(commit) else ""

    # ── what the files say ────────────────────────────────────────────────────────────────────────
    def _check_beside(self, spec: ClusterSpec, place: Path) -> None:
        """Refuse a copy of config.json that left its quantization behind."""
        beside = place.with_name(QUANT_CONFIG)
        if not spec.model.path or beside.exists():
            return
        there = Path(spec.model.path) / QUANT_CONFIG
        with contextlib.suppress(OSError, ValueError):
            if there.is_file():
                raise SpecError(
                    f"{QUANT_CONFIG} beside the model's config.json, as in the checkpoint",
                    found=f"{there}, and no {beside}",
                    do="copy it there too: vLLM reads the quantization from it",
                    where=spec.where("model", "config"),
                )

    def _digests(self, spec: ClusterSpec, config: Path) -> dict[str, str]:
        """SHA-256 of the small files that define a replica.

        Files of the hosts are read where the plan is made on a host. Elsewhere the digest that the plan
        on disk has of them stays, so that a plan is the same wherever it is made again.
        """
        before = self._before
        known = before.replica.content if before is not None else []
        found = {item.name: str(item.value) for item in known}
        found.pop(quant_config_path(spec), None)
        places = {path: Path(path) for path in host_files(spec)}
        places[model_config_path(spec)] = config
        if config.name == CONFIG:
            places[quant_config_path(spec)] = config.with_name(QUANT_CONFIG)
        for name, place in places.items():
            with contextlib.suppress(OSError):  # not here, or not for us to look at
                if place.is_file() and os.access(place, os.R_OK):
                    found[name] = hashlib.sha256(read_bytes(place, MAX_BYTES)).hexdigest()
        return found

    def _stored(
        self,
        spec: ClusterSpec,
        folder: Path,
        digests: Mapping[str, str],
        snapshot: Snapshot | None,
    ) -> Mapping[str, int]:
        """Bytes of the checkpoint's tensors by type, from the headers of its files; empty: not known.

        As with the digests, what the plan on disk has of them stays where they are not at hand, as long
        as the model's config.json, and an id's commit, are the same.
        """
        if serving_pool(spec).gpu == CPU:  # no GPU memory to prove
            return {}
        found: Mapping[str, int] = read_checkpoint(folder, cached=snapshot is not None)
        if not found and spec.model.path:
            found = read_checkpoint(Path(spec.model.path))
        return found or self._recorded(spec, digests, snapshot) or self._fetched(snapshot)

    def _recorded(
        self, spec: ClusterSpec, digests: Mapping[str, str], snapshot: Snapshot | None
    ) -> Mapping[str, int]:
        name, before = model_config_path(spec), self._before
        if before is None or (snapshot is not None and _commit_of(before) != snapshot.commit):
            return {}
        same = any(
            item.name == name and item.value == digests.get(name) for item in before.replica.content
        )
        return {item.name: item.value for item in before.checkpoint} if same else {}

    def _fetched(self, snapshot: Snapshot | None) -> Mapping[str, int]:
        return self._open_hub().stored(snapshot) if snapshot is not None else {}


def _no_number() -> str:
    """The variables of huggingface_hub that should be whole numbers, and are none."""
    return ", ".join(
        f"{name}={brief(os.environ[name])}"
        for name in NUMBERS
        if not re.fullmatch(r"\s*[+-]?\d+\s*", os.environ.get(name, "0"))
    )


def _commit_of(plan: Plan) -> str:
    """The commit that a plan of an id serves; empty: it names none."""
    found = str(plan.replica.engine_arguments().get("revision", ""))
    return found if COMMIT.fullmatch(found) else ""
