"""Was a flag ever there, is it gone, did it come later? What the text and its release say by themselves."""

from __future__ import annotations

from rayserve.engine import VLLM_VERSION, load_snapshot
from rayserve.engine.commands import DEMO
from rayserve.engine.flags import (
    FlagHistory,
    Presence,
    Version,
    changes,
    histories,
    releases_read,
)
from rayserve.planner.convert.draft import Draft, Setting, Severity
from rayserve.spec import nearest

MENDED: dict[str, tuple[Severity, str, str]] = {
    "background": ("note", "{} is left out", "nothing: the service runs in the background anyway"),
    "beside": ("note", "{} is left out", "nothing: the playbooks prepare hosts"),
    "broken_continuation": (
        "error",
        "a shell would run this in pieces",
        "end the line with the backslash; a comment goes on a line of its own, outside the command",
    ),
    "broken_line": (
        "error",
        "a shell would run this in pieces",
        "end each line but the last with \\",
    ),
    "foreign_shell": ("note", "written for Windows", "on Linux a line goes on after \\"),
    "glued": (
        "error",
        "a flag and its value are one item of a list",
        "vLLM gets them as one word, and refuses it: write two items, or --flag=value",
    ),
    "manifest": (
        "note",
        "{} is left out",
        "look through it: ports, volumes and devices are what the playbooks set up",
    ),
    "prompt": ("note", "a prompt sign was left out", ""),
    "redirection": ("note", "{} is left out", "nothing: the service's log keeps the output"),
    "typography": ("warning", "typographic characters were put right", "paste from a plain editor"),
}
"""What the reader of shell text mended: how grave it is, what it means, what to do. {}: what it found,
which else is told as the reason.
"""


def judge_history(draft: Draft, setting: Setting) -> None:
    """Was the flag ever there, is it gone, or did it come after the release of the command line?"""
    history = histories().get(setting.name)
    if history is None:
        _unheard(draft, setting)
    elif history.never:
        whose = f"; {history.of} has it" if history.of else ""
        draft.find(
            "error",
            "never_existed",
            setting,
            f"{setting.written} never was a flag of vLLM{whose}",
            why=f"none of {_lists()} has it",
            do=history.do,
            certainty="read",
        )
    elif history.presence(VLLM_VERSION) != Presence.PRESENT:
        _removed(draft, setting, history)
    else:
        _arrived(draft, setting, history)


def _unheard(draft: Draft, setting: Setting) -> None:
    known = load_snapshot()
    close = nearest(setting.name, [*known.engine, *known.frontend])
    draft.find(
        "error",
        "never_existed",
        setting,
        f"{setting.written} is in none of the lists of flags that were read",
        why=f"read: {_lists()}. A flag that came and went between two of them is missed",
        do=f"write --{close.replace('_', '-')}" if close else "leave it out",
        certainty="read",
    )


def _lists() -> str:
    read = releases_read()
    return f"the lists of {len(read)} releases from {read[0]} to {read[-1]}"


def _removed(draft: Draft, setting: Setting, history: FlagHistory) -> None:
    version = draft.context.version
    at = history.presence(str(version)) if version is not None else Presence.UNKNOWN
    last = f"{history.last} is the last release known to have it" if history.last else ""
    gone = f"vLLM {history.gone} does not have it any more" if history.gone else ""
    why = "; ".join(part for part in (gone, last) if part)
    if history.deprecated:
        why += f"; deprecated since {history.deprecated}"
    own = {
        Presence.PRESENT: f"vLLM {version} takes it",
        Presence.GONE: f"vLLM {_refusing(version)} refuses it",
        Presence.NOT_YET: f"vLLM {version} does not have it yet",
        Presence.UNKNOWN: f"whether vLLM {version} takes it is not known" if version else "",
        Presence.NEVER: "",
    }[at]
    draft.find(
        "warning"
        if version is not None and at in {Presence.PRESENT, Presence.UNKNOWN}
        else "error",
        "removed",
        setting,
        f"{setting.written} was removed from vLLM" + (f"; {own}" if own else ""),
        why=why,
        do=history.do,
        certainty=history.certainty,
        source=history.source,
    )


def _refusing(version: Version | None) -> str:
    """The release that is known to refuse; of one after the last that was read nothing is known."""
    last = Version.parse(releases_read()[-1])
    if version is None or last is None or version <= last:
        return str(version)
    return f"{last}, the last whose list was read,"


def _arrived(draft: Draft, setting: Setting, history: FlagHistory) -> None:
    version = draft.context.version
    if history.deprecated:
        draft.find(
            "warning",
            "deprecated",
            setting,
            f"{setting.written} is deprecated",
            why=f"vLLM says that {history.deprecated} drops it",
            do=history.do,
            certainty=history.certainty,
            source=history.source,
        )
    if version is None or history.presence(str(version)) != Presence.NOT_YET:
        return
    draft.find(
        "warning",
        "newer",
        setting,
        f"vLLM {version} does not have {setting.written}",
        why=f"it is absent from {history.lacks}, and first seen in {history.first}",
        do=f"nothing: vLLM {VLLM_VERSION} takes it",
        certainty=history.certainty,
        source=history.source,
    )


def judge_text(draft: Draft) -> None:
    """What the text itself, its way to start the server and the version say."""
    for note in draft.command.notes:
        severity, what, do = MENDED[note.kind]
        why = "" if "{}" in what else f"found {note.what}"
        what = what.replace("{}", note.what)
        where = f"line {note.line}: " if note.line else ""
        draft.find(severity, note.kind, "", where + what, why=why, do=do)
    if draft.command.program == DEMO:
        row = changes().entry["api_server"]
        draft.find(
            "error" if not draft.before(row["gone"]) else "warning",
            "removed",
            "vllm.entrypoints.api_server",
            "the demonstration server is not the OpenAI server",
            why=f"{row['why']}; absent from {row['gone']} on",
            do=row["do"],
            certainty="read",
            source=row["source"],
        )
    _judge_version(draft)


def _judge_version(draft: Draft) -> None:
    version, read = draft.context.version, releases_read()
    last = Version.parse(read[-1])
    if version is None:
        draft.find(
            "note",
            "version",
            "",
            "the release that the command was written for is not known",
            why=f"so a removed flag counts as an error of vLLM {VLLM_VERSION}, the pinned one",
            do="give --version, such as 0.7.3",
        )
    elif last is not None and version > last:
        draft.find(
            "warning",
            "version",
            "",
            f"vLLM {version} is later than {read[-1]}, the last release whose flags were read",
            why="what it has or lacks is not known here; its flags are judged as far as others tell",
            do=f"correct --version if it is a slip; else compare with `vllm serve --help` of {version}",
        )
    elif version not in {Version.parse(release) for release in read}:
        draft.find(
            "note",
            "version",
            "",
            f"no whole list of the flags of vLLM {version} was read",
            why=f"read: {_lists()}; what lies between is told from narrower dates, or not at all",
            do="take what is said to be unknown for unknown",
        )
    row = changes().defaults["gpu_memory_utilization"]
    if draft.before(row["since"]) and draft.get("limits.gpu_memory_utilization") is None:
        draft.put("limits.gpu_memory_utilization", row["was"], f"the default of vLLM {version}")
        draft.find(
            "note",
            "default_changed",
            "--gpu-memory-utilization",
            f"--gpu-memory-utilization was {row['was']} by default until {row['until']} and is {row['now']} from {row['since']}",
            why=f"it is written out here, as vLLM {version} has it",
            do="remove the line to take the new one",
            certainty="read",
            source=row["source"],
        )
    if draft.before("0.8.0") and "enable_prefix_caching" not in draft.given:
        draft.find(
            "note",
            "default_changed",
            "--enable-prefix-caching",
            "prefix caching and chunked prefill are on by default now",
            why=f"the engine of vLLM {version} had both off for most models; cluster.yml has both on",
            do="write `scheduling` to change it",
            certainty="reported",
            source="vllm#18571",
        )
