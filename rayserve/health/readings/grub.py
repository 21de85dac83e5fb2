"""Which kernel does GRUB start next? By its configuration and its environment block.

`grub.cfg` names a default: a number, a title or an id, with `>` between a submenu and an entry of it,
or what was saved. `grub-reboot` writes an entry for the next boot alone, which comes first. A name that
no entry has starts the first one (GRUB's normal/menu.c, get_entry_number and its caller).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

TITLE = re.compile(r"\s*(menuentry|submenu)\s+(?:'([^']*)'|\"([^\"]*)\"|(\S+))(.*)")
IDENTITY = re.compile(r"(?:\$menuentry_id_option|--id[ =])\s*['\"]?([^'\"\s{]+)")
KERNEL = re.compile(r"\s*linux(?:16|efi)?\s+\S*?vmlinuz-(\S+)")
DEFAULT = re.compile(r"^\s*set default=[\"']?([^\"'\n]*)", re.MULTILINE)


@dataclass(slots=True)
class Entry:
    """A line of the menu: an entry with the kernel that it starts, or a submenu with its entries."""

    title: str
    identity: str
    kernel: str = ""
    entries: list[Entry] = field(default_factory=list)


def parse_environment(text: str) -> dict[str, str]:
    """`grubenv`: a name and a value a line, filled up with `#`."""
    rows = (line.partition("=") for line in text.splitlines() if not line.startswith("#"))
    return {name: value for name, equals, value in rows if equals}


def parse_menu(text: str) -> list[Entry]:
    """The menu of a grub.cfg."""
    top = Entry("", "")
    open_blocks: list[Entry | None] = []
    for line in text.splitlines():
        owner = next((one for one in reversed(open_blocks) if one is not None), top)
        stripped = line.strip()
        if match := TITLE.match(line):
            identity = IDENTITY.search(match[5])
            entry = Entry(match[2] or match[3] or match[4] or "", identity[1] if identity else "")
            owner.entries.append(entry)
            if stripped.endswith("{"):
                open_blocks.append(entry)
        elif stripped.endswith("{"):
            open_blocks.append(None)  # a function
        elif stripped == "}" and open_blocks:
            open_blocks.pop()
        elif match := KERNEL.match(line):
            owner.kernel = owner.kernel or match[1]
    return top.entries


def next_release(
    menu: str, environment: Mapping[str, str] | None, written: str, releases: Sequence[str]
) -> str:
    """Release of the kernel that the next boot starts; empty: not known.

    Args:
        menu: grub.cfg; empty where it may not be read.
        environment: the block of grubenv; None where it may not be read.
        written: GRUB_DEFAULT of /etc/default/grub, which counts where there is no grub.cfg to read.
        releases: the installed kernels, oldest first.
    """
    entries = parse_menu(menu)
    defaults = [text for text in DEFAULT.findall(menu) if text != "${next_entry}"]
    default = defaults[-1] if defaults else written
    if default in ("saved", "${saved_entry}"):
        if environment is None:
            return ""
        default = environment.get("saved_entry", "")
    default = (environment or {}).get("next_entry") or default
    if any(_kernels(entries)):
        return _chosen(entries, default)
    # Entries of a boot loader specification (blscfg) stand in files of their own, the newest first.
    if default in ("", "0"):
        return releases[-1] if releases else ""
    return named(default, releases)


def named(entry: str, releases: Sequence[str]) -> str:
    """The release that stands in the name of an entry; empty: none."""
    inside = [one for one in releases if re.search(rf"(?<![\w.]){re.escape(one)}(?![\w.])", entry)]
    return max(inside, key=len, default="")


def _kernels(entries: Sequence[Entry]) -> Iterator[str]:
    for entry in entries:
        yield entry.kernel
        yield from _kernels(entry.entries)


def _chosen(entries: Sequence[Entry], default: str) -> str:
    names = [part.replace("\0", ">") for part in default.replace(">>", "\0").split(">")]
    chosen: Entry | None = None
    while entries:
        name = names.pop(0) if names else ""
        same = [one for one in entries if name and name in (one.title, one.identity)]
        place = int(name) if name.isdecimal() else 0
        chosen = same[0] if same else entries[place if place < len(entries) else 0]
        entries = chosen.entries
    return chosen.kernel if chosen is not None else ""
