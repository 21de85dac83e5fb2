"""Which files may a plan take the place of? None that it is made from, and none that another wrote."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from rayserve.errors import UsageError
from rayserve.inventory import Files, check_places, current
from rayserve.planner.content import host_files
from rayserve.planner.render import is_generated
from rayserve.planner.support.modelopt import QUANT_CONFIG
from rayserve.spec import ClusterSpec
from rayserve.starts import is_ledger


def inputs(files: Files, spec: ClusterSpec, ledgers: Sequence[str] = ()) -> tuple[Path, ...]:
    """All files that a plan is made from, whether they are there or not.

    Args:
        files: of the environment.
        spec: with absolute paths.
        ledgers: files of starts whose starts are added to those beside the spec.
    """
    folder = Path(os.path.realpath(files.spec)).parent  # as its relative names are read
    guess = spec.speculative
    names = [model.config for model in (spec.model, *spec.model.candidates)]
    names.append(guess.config if guess is not None else "")
    configs = [folder / name for name in names if name]
    named = [*host_files(spec), spec.endpoint.api_key_file, *ledgers]
    return (
        files.spec,
        files.starts,
        *configs,
        *(config.parent / QUANT_CONFIG for config in configs),
        *(Path(name) for name in named if name),
    )


def check_targets(targets: Sequence[Path], files: Files, read: Iterable[Path]) -> None:
    """Refuse to write a plan in the place of something else; nothing is written here.

    Args:
        targets: what is to be written; the starts beside the spec may grow.
        files: of the environment.
        read: what the plan is made from.

    Raises:
        UsageError: a file is one that the plan is made from, or was written by someone else; two are
            one; a folder is a link to nothing.
        HostError: what is to be replaced cannot be read.
    """
    check_places(targets)
    grows = {files.starts}.intersection(targets)
    sources = {os.path.realpath(path): path for path in read if path not in grows}
    for path in targets:
        problem = ""
        source = sources.get(os.path.realpath(path))
        is_ours = is_ledger if path == files.starts else is_generated
        if source is not None:
            problem = f"{path} is {source}, which the plan is made from"
            problem = f"{path}, which the plan is made from" if path == source else problem
        elif not is_ours(current(path)):
            problem = f"{path} was not written by `rayserve plan`, and is not replaced"
        if problem:
            raise UsageError(
                f"a place of its own for {path.name}",
                found=problem[:300],
                do="name another folder with --out, or move that file out of the way",
            )
