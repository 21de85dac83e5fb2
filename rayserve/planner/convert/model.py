"""Which checkpoint does a command line name, and how do hosts and clients find it?"""

from __future__ import annotations

import re

from rayserve.planner.convert.draft import Draft, excerpt
from rayserve.spec.base import COMMIT, HF_ID, MODEL_NAME, PATTERNS
from rayserve.spec.placeholders import PLACEHOLDER, unfilled
from rayserve.spec.problem import CLOUD_SCHEMES
from rayserve.veil import holds_secret

FLAGS = {"model", "revision"}
"""Flags that are read here, when all others are known."""


def place_model(draft: Draft) -> None:
    """Set `model` from the positional argument or --model; a placeholder where neither will do."""
    given = draft.given.get("model")
    written = draft.command.model or (given.text if given is not None else "")
    if given is not None:
        key = "model.hf_id" if re.fullmatch(HF_ID, written or "/") else "model.path"
        draft.carry(given, key, "")
        draft.drop(key)
    _place_checkpoint(draft, written)
    _place_name(draft, written)
    why = "config.json of the checkpoint, beside this file: the plan reads it"
    if draft.get("model.hf_id"):
        why += "; or remove this line: the plan then fetches it"
    draft.hold("model.config", "config.json", why)


def _place_name(draft: Draft, written: str) -> None:
    """Set `model.served_name`, and tell where clients would not find what they ask vLLM for."""
    flag, asked = draft.given.get("served_model_name"), draft.get("model.served_name")
    whole_name = "" if "REPLACE" in written or "$" in written else written
    leaf = whole_name.rstrip("/").rpartition("/")[2]
    name = asked or (whole_name if re.fullmatch(HF_ID, whole_name) else leaf)
    fitting = re.sub(r"[^A-Za-z0-9._/-]", "-", name).lstrip("._/-")[:128]
    taken = re.fullmatch(MODEL_NAME, fitting) is not None and not holds_secret(fitting)
    served = fitting if taken else "chat"
    draft.put("model.served_name", served)
    theirs = asked or (flag.text if flag is not None else "") or written
    if served == theirs or not theirs:
        return
    why = f"a name is {PATTERNS[MODEL_NAME]}; vLLM takes any"
    if flag is not None and asked is None and flag.text:
        why = f"what {flag.written} says is not known here"
    elif asked is None:
        why = (
            "without --served-model-name clients of vLLM send the model as its command line has it"
        )
    draft.find(
        "note" if asked is None else "warning",
        "not_the_same",
        "" if asked is None or flag is None else flag,
        f"clients ask for `{excerpt(served)}`, no longer for `{excerpt(theirs)}`",
        why=why,
        do="set model.served_name to what clients send"
        if asked is None
        else "change the name in the clients, or let the gateway rewrite it",
    )


def _place_checkpoint(draft: Draft, written: str) -> None:
    revision = draft.given.get("revision")
    if written and re.fullmatch(HF_ID, written):
        draft.put("model.hf_id", written)
        if revision is not None and COMMIT.fullmatch(revision.text):
            draft.carry(revision, "model.revision", revision.text)
            return
        why = "so that every host loads the same weights"
        if revision is not None:  # a branch moves, and a short hash is none that a plan can check
            draft.leave(revision)
            why = f"in full, which {excerpt(revision.text)} names now, {why}"
        draft.hold("model.revision", PLACEHOLDER, f"the commit, {why}")
        return
    if revision is not None:
        draft.leave(revision)
    if written.startswith("/") and "$" not in written and "<" not in written:
        if unfilled(written):
            draft.hold("model.path", written, "the folder on every host; this one is of an example")
        else:
            draft.put("model.path", written)
        return
    leaf = re.sub(r"[^\w.-]", "-", written.rstrip("/").rpartition("/")[2]) or "model"
    remote = written.startswith(CLOUD_SCHEMES)
    why = (
        "the folder on every host's disk that the weights are staged to"
        if remote
        else "the folder on every host, in full"
    )
    draft.hold("model.path", f"/{PLACEHOLDER}/{leaf}", why)
    draft.find(
        "error" if not written else "note",
        "model",
        "",
        f"the model is `{excerpt(written)}`" if written else "the command line names no model",
        why="hosts share no working folder" if written else "vLLM would load a small default model",
        do="write model.path or model.hf_id",
    )
