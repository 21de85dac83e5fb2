"""Which flags of vLLM does a pasted command line set? Read, never run.

text ──(shell)──> commands ──> the one that starts vLLM ──> model, flags, environment

`vllm serve`, `python -m vllm.entrypoints.openai.api_server`, the demonstration server
`vllm.entrypoints.api_server`, a path to either file, and `docker run … vllm/vllm-openai:TAG`, each
behind nohup, sudo, env and their like; a container of a manifest; the flags alone.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from rayserve.engine.flags import Version, histories
from rayserve.engine.manifests import Container, containers
from rayserve.engine.parser import Flag, read_arguments
from rayserve.engine.programs import (
    BESIDE,
    CLIENTS,
    CONTAINERS,
    DOCKER_SWITCHES,
    MOST_SHELLS,
    SHELLS,
    WRAPPERS,
)
from rayserve.engine.shell import Note, Simple, Word, clean, refuse, split
from rayserve.errors import InputError

OPENAI, DEMO, SERVE = "openai_api_server", "api_server", "vllm_serve"
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
_PYTHON = re.compile(r"(?:.*/)?python[\d.]*(?:\.exe)?")
_MODULES = {
    "vllm.entrypoints.openai.api_server": OPENAI,
    "vllm.entrypoints.api_server": DEMO,
}
HF_LIKE = r"[\w.-]+/[\w.-]+"
_FILES = re.compile(r".*vllm/entrypoints/(openai/)?api_server\.py")


@dataclass(frozen=True)
class Command:
    """What a command line starts."""

    program: str
    """`vllm_serve`, `openai_api_server` or `api_server`."""
    model: str
    """The positional model; empty where there is none."""
    flags: tuple[Flag, ...]
    env: tuple[tuple[str, str], ...]
    image: str = ""
    gpus: int = 0
    """GPUs that the command itself makes visible; 0 where it does not say."""
    version: str = ""
    """Release that the text names, by an image's tag or by pip."""
    notes: tuple[Note, ...] = ()

    def written(self) -> str:
        """How it is started, for a heading."""
        module = {OPENAI: "vllm.entrypoints.openai.api_server", DEMO: "vllm.entrypoints.api_server"}
        return "vllm serve" if self.program == SERVE else f"python -m {module[self.program]}"


@dataclass
class _Found:
    """What is gathered on the way to the server's own flags."""

    env: dict[str, str] = field(default_factory=dict)
    shell: dict[str, str] = field(default_factory=dict)
    notes: list[Note] = field(default_factory=list)
    image: str = ""
    gpus: int = 0
    version: str = ""
    others: list[InputError] = field(default_factory=list)
    """Why a command of vLLM or Python is no server: told where the text starts none."""


def parse_command(text: str) -> Command:
    """The command line in `text`.

    Raises:
        InputError: there is none, there are several, another program is started, or the text is not
            one that can be read without running it.
    """
    found = _Found()
    commands = _manifest(text, found) or _read(text, found, depth=0)
    if not commands and found.others:
        raise found.others[0]
    if not commands:
        commented = re.search(r"#\s*(vllm serve|python3? -m vllm)", text)
        raise refuse(
            "a command line that starts vLLM",
            "only comments" if commented else "none",
            "remove the leading #"
            if commented
            else "paste `vllm serve …` or `python -m vllm.entrypoints.openai.api_server …`",
        )
    if len(commands) > 1:
        raise refuse(
            "one server",
            f"{len(commands)} command lines that start vLLM",
            "convert each by itself",
            commands[1][1][0].line if commands[1][1] else None,
        )
    program, words = commands[0]
    model, flags = read_arguments(words)
    return Command(
        program=program,
        model=model,
        flags=tuple(flags),
        env=tuple(found.env.items()),
        image=found.image,
        gpus=found.gpus or _visible(found.env),
        version=found.version,
        notes=tuple(found.notes),
    )


def _visible(env: dict[str, str]) -> int:
    """How many GPUs CUDA_VISIBLE_DEVICES and its like name; 0 where they name none."""
    for name in ("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"):
        devices = [item for item in env.get(name, "").split(",") if item.strip()]
        if devices and all(re.fullmatch(r"\s*(\d+|GPU-[\w-]+)\s*", item) for item in devices):
            return len(devices)
    return 0


def _read(text: str, found: _Found, depth: int) -> list[tuple[str, list[Word]]]:
    """The servers that a text starts, as (program, words after it)."""
    simples, notes = split(text)
    found.notes.extend(notes)
    servers: list[tuple[str, list[Word]]] = []
    before = ""
    for simple in simples:
        filled = Simple(tuple(word.fill(found.shell) for word in simple.words), simple.after)
        if before == "|":
            _piped(filled, found)
        elif not (before == "||" and filled.words[0].text in {"exit", "true"}):
            server = _one(filled, found, depth)
            if server is not None:
                servers.append(server)
        if simple.after == "&":
            found.notes.append(Note("background", "the `&`", simple.words[0].line))
        before = simple.after
    return servers


def _piped(simple: Simple, found: _Found) -> None:
    head = simple.words[0]
    if head.text != "tee":
        raise refuse(
            "one plain command",
            f"a pipe into `{head.text[:40]}`",
            "paste what stands before |",
            head.line,
        )
    found.notes.append(Note("redirection", "where the output goes", head.line))


def _one(simple: Simple, found: _Found, depth: int) -> tuple[str, list[Word]] | None:
    """The server of one command; None for a command that only prepares one."""
    words = list(simple.words)
    given: dict[str, str] = {}
    while words and (match := _ASSIGNMENT.fullmatch(words[0].text)):
        given[match[1]] = match[2]
        words.pop(0)
    found.shell.update(given)
    if not words:
        return None
    head = words[0]
    if head.text in {"export", "set", "setx"}:
        pairs = [_ASSIGNMENT.fullmatch(word.text) for word in words[1:]]
        exported = {pair[1]: pair[2] for pair in pairs if pair}
        exported.update({w.text: found.shell[w.text] for w in words[1:] if w.text in found.shell})
        found.shell.update(exported)
        found.env.update(exported)
        return None
    found.env.update(given)
    server = _server(words, found, depth)
    if server is not None:
        return server
    if head.text in BESIDE or (head.text in CONTAINERS and words[1:2] and words[1].text == "pull"):
        _remember_version(words, found)
        found.notes.append(Note("beside", f"`{head.text}`, which starts no server,", head.line))
        return None
    other = _no_server(words)
    if head.text == "vllm" or CLIENTS.fullmatch(head.text):
        found.others.append(other)
        found.notes.append(Note("beside", f"`{head.text}`, which starts no server,", head.line))
        return None
    raise other


def _no_server(words: Sequence[Word]) -> InputError:
    """Why a command is not the one that is asked for."""
    head = words[0]
    if head.text == "vllm":
        other = words[1].text if len(words) > 1 else "nothing"
        return refuse(
            "`vllm serve`",
            f"`vllm {other[:40]}`",
            "paste the command that starts the server",
            head.line,
        )
    return refuse(
        "a command line that starts vLLM, alone",
        f"`{head.text[:60]}`, another program",
        "paste the vLLM command by itself; nothing of the text is run",
        head.line,
    )


def _manifest(text: str, found: _Found) -> list[tuple[str, list[Word]]]:
    """The servers of the containers of a manifest; none where the text is none."""
    servers = []
    for container in containers(clean(text)):
        inner = _Found()
        server = _contained(container, inner)
        if server is not None:
            servers.append(server)
            found.env, found.notes, found.image = inner.env, inner.notes, inner.image
            found.gpus, found.version = inner.gpus, inner.version
    return servers


def _contained(container: Container, found: _Found) -> tuple[str, list[Word]] | None:
    """The server that a container of a manifest starts."""
    found.env.update(container.env)
    found.shell.update(container.env)
    found.gpus = container.gpus
    words, server = list(container.words), None
    if container.script:
        script = container.script.strip()
        head = script.split(maxsplit=1)[0] if script else ""
        bare = head.startswith("-") or ("vllm" in container.image and re.fullmatch(HF_LIKE, head))
        # Compose takes a text apart at any blank; only a shell minds the ends of lines.
        servers = _read(
            "vllm serve " + " ".join(script.split()) if bare else script, found, depth=1
        )
        found.notes = [note for note in found.notes if note.kind not in {"broken_line", "prompt"}]
        server = servers[0] if len(servers) == 1 else None
        if server is not None and bare:
            server = OPENAI, server[1]
    elif words:
        server = _in_image(container.image, words, found, 0)
        if server is None and words[0].dashed and any(w.text.startswith("--model") for w in words):
            server = OPENAI, words
    if server is not None:
        _name_image(container.image, found)
        if container.glued:
            found.notes.append(
                Note("glued", f"`{container.glued[0]}` and its value in one item", 0)
            )
        if container.image:
            found.notes.append(Note("manifest", "what the manifest says of the container", 0))
    return server


def _remember_version(words: Sequence[Word], found: _Found) -> None:
    for word in words:
        match = re.search(
            r"\bvllm(?:\[[\w,-]+\])?==([\w.+]+)|vllm/vllm-openai:v?([\w.+-]+)", word.text
        )
        if match and Version.parse(match[1] or match[2]):
            found.version = match[1] or match[2]


def _server(words: list[Word], found: _Found, depth: int) -> tuple[str, list[Word]] | None:
    """The server that stands in `words`, behind wrappers; None where none does."""
    index = 0
    while index < len(words):
        text = words[index].text
        base = text.rsplit("/", 1)[-1]
        if base in CONTAINERS and index + 1 < len(words):
            return _container(words[index + 1 :], found, depth)
        if text in SHELLS and depth < MOST_SHELLS:
            return _inner_shell(words[index + 1 :], found, depth)
        server = _program(words[index:])
        if server is not None:
            return server
        if index == 0 and base not in WRAPPERS:
            return None
        if index and depth < MOST_SHELLS and re.search(r"\s", text) and "vllm" in text:
            servers = _read(text, found, depth + 1)
            return servers[0] if len(servers) == 1 else None
        match = _ASSIGNMENT.fullmatch(text)
        if match:
            found.env[match[1]] = match[2]
        index += 1
    return None


def _program(words: list[Word]) -> tuple[str, list[Word]] | None:
    """The server that begins at the first word."""
    texts = [word.text for word in words]
    name = texts[0].partition("=")[0].removeprefix("--").replace("-", "_")
    if words[0].dashed and texts[0].startswith("--") and name in histories():
        return OPENAI, words  # the flags alone
    if texts[0].rsplit("/", 1)[-1] == "vllm" and texts[1:2] == ["serve"]:
        return SERVE, words[2:]
    file = _FILES.fullmatch(texts[0])
    if file:
        return (OPENAI if file[1] else DEMO), words[1:]
    if not _PYTHON.fullmatch(texts[0]):
        return None
    for index, text in enumerate(texts[1:], 1):
        file = _FILES.fullmatch(text)
        if file:
            return (OPENAI if file[1] else DEMO), words[index + 1 :]
        if text == "-m" and index + 1 < len(texts):
            module = texts[index + 1]
            if module in _MODULES:
                return _MODULES[module], words[index + 2 :]
            if module in {"vllm", "vllm.entrypoints.cli.main"} and texts[index + 2 :][:1] == [
                "serve"
            ]:
                return SERVE, words[index + 3 :]
            return None
        if not text.startswith("-"):
            return None
    return None


def _inner_shell(words: list[Word], found: _Found, depth: int) -> tuple[str, list[Word]] | None:
    """What `bash -c "…"` runs."""
    texts = [word.text for word in words]
    flags = [index for index, text in enumerate(texts) if re.fullmatch(r"-[a-z]*c", text)]
    if not flags or flags[0] + 1 >= len(texts):
        return None
    servers = _read(texts[flags[0] + 1], found, depth + 1)
    return servers[0] if len(servers) == 1 else None


def _container(words: list[Word], found: _Found, depth: int) -> tuple[str, list[Word]] | None:
    """The server in `docker run [options] IMAGE [arguments]` or `docker exec [options] NAME command`."""
    verb = words[0].text
    if verb not in {"run", "exec", "create"}:
        return None
    entrypoint, index = "", 1
    while index < len(words) and words[index].text.startswith("-"):
        name, equals, value = words[index].text.partition("=")
        index += 1
        if not equals and name not in DOCKER_SWITCHES and index < len(words):
            value = words[index].text
            index += 1
        if name in {"-e", "--env"}:
            match = _ASSIGNMENT.fullmatch(value)
            if match:
                found.env[match[1]] = match[2]
        elif name == "--gpus":
            found.gpus = _docker_gpus(value)
        elif name == "--entrypoint":
            entrypoint = value
    if index >= len(words):
        return None
    image = words[index].text
    _name_image(image, found)
    rest = words[index + 1 :]
    if entrypoint:
        rest = [Word(entrypoint, words[index].line), *rest]
    if verb == "exec" or entrypoint:
        return _server(rest, found, depth) if rest else None
    return _in_image(image, rest, found, depth)


def _name_image(image: str, found: _Found) -> None:
    found.image = image
    tag = image.rpartition(":")[2] if "vllm" in image else ""
    if Version.parse(tag):
        found.version = tag


def _in_image(
    image: str, rest: list[Word], found: _Found, depth: int
) -> tuple[str, list[Word]] | None:
    """What runs in a container: the words behind the image, or its own server with them as flags."""
    server = _server(rest, found, depth) if rest else None
    if server is not None or "vllm" not in image:
        return server
    if rest and rest[0].text == "serve":
        return SERVE, rest[1:]
    # vLLM's own image starts the server; what follows the image is its arguments.
    if not rest or rest[0].text.startswith(("-", "<")) or "/" in rest[0].text:
        return OPENAI, rest
    return None


def _docker_gpus(value: str) -> int:
    if re.fullmatch(r"[0-9]{1,4}", value):
        return int(value)
    devices = re.search(r"device=([\w,-]+)", value)
    return len(devices[1].split(",")) if devices else 0
