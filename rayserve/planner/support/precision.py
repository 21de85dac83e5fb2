"""What can a GPU not do of what the spec asks, what runs instead, and which value works?

The facts are rows of `data/precisions.yml`, each with the line of vLLM that it follows. A finding is
a refusal where vLLM would not start, a warning where it starts and disappoints, a note where it
silently does something else.
"""

from __future__ import annotations

import functools
import importlib.resources
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import yaml

from rayserve.documents import Loc
from rayserve.errors import SpecError, Where
from rayserve.planner.support.schemes import Scheme
from rayserve.spec import nearest

Level = Literal["refuse", "warn", "note"]
Kind = Literal["full", "mla", "sparse_mla"]
_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_KV, _QUANT, _DTYPE = (
    ("precision", key) for key in ("kv_cache_dtype", "quantization", "dtype")
)  # fmt: skip
KIND_NAMES = {"full": "attention", "mla": "MLA", "sparse_mla": "sparse MLA"}


@dataclass(frozen=True)
class Finding:
    """One thing that the chip, the host or the cut cannot do; phrases as in our errors."""

    level: Level
    key: Loc
    """Key of the spec that it is about."""
    needed: str
    found: str
    do: str = ""
    source: str = ""
    """The line of vLLM that it follows."""

    def __str__(self) -> str:
        return f"{self.needed}; found {self.found}" + (f"; {self.do}" if self.do else "")

    def error(self, where: Where | None = None) -> SpecError:
        """The same as an error, for a refusal."""
        return SpecError(self.needed, found=self.found, do=self.do, where=where)


@dataclass(frozen=True)
class Attention:
    """What attention asks of a backend. MLA: `head_dim` is kv_lora_rank + qk_rope_head_dim."""

    kind: Kind = "full"
    head_dim: int = 128
    sinks: bool = False
    images: bool = False
    """Tokens of an image see each other both ways, as in Gemma 3."""
    sliding: bool = False


@dataclass(frozen=True)
class Table:
    """The content of `data/precisions.yml`."""

    vllm: str
    chips: Mapping[int, str]
    methods: Mapping[str, Mapping[str, Any]]
    kernel_act: Sequence[str]
    removed: Mapping[str, str]
    formats: Mapping[str, Mapping[str, Any]]
    kv_cache_dtypes: Sequence[str]
    attention: Mapping[str, Mapping[str, Any]]


@functools.lru_cache(maxsize=1)
def table() -> Table:
    """The committed table."""
    text = importlib.resources.files("rayserve").joinpath("data", "precisions.yml")
    return Table(**yaml.load(text.read_text("utf-8"), Loader=_Loader))  # noqa: S506  (a safe loader)


def capability_of(number: float) -> int:
    """vLLM's digits of a compute capability: 8.9 is 89, 12.0 is 120."""
    return round(number * 10)


def check_precision(
    schemes: Sequence[Scheme],
    *,
    dtype: str,
    kv_cache_dtype: str,
    attention: Sequence[Attention],
    compute_capability: float | None,
) -> tuple[Finding, ...]:
    """All findings about number formats on one kind of GPU, refusals first.

    `dtype` is the compute type, resolved; `kv_cache_dtype` as in the spec; `compute_capability` as
    in the catalogue, None for a GPU that is not NVIDIA's: there the methods' types alone are judged.
    """
    if compute_capability is None:
        found = [check_type(scheme, dtype=dtype) for scheme in dict.fromkeys(schemes)]
        return tuple(finding for finding in found if finding is not None)
    capability = capability_of(compute_capability)
    findings: list[Finding] = _check_dtype(dtype, capability)
    for scheme in dict.fromkeys(schemes):
        findings += check_scheme(scheme, dtype=dtype, capability=capability)
    findings += _check_kv(schemes, dtype, kv_cache_dtype, attention, capability)
    order = ("refuse", "warn", "note")
    return tuple(sorted(dict.fromkeys(findings), key=lambda item: order.index(item.level)))


# ── weights ───────────────────────────────────────────────────────────────────────────────────────
def check_scheme(scheme: Scheme, *, dtype: str, capability: int) -> list[Finding]:
    """Findings about one scheme of quantization; `capability` in vLLM's digits."""
    if not scheme.method:
        return []
    row = table().methods.get(scheme.method)
    if row is None:
        return [_unknown_method(scheme.method)]
    source = str(row["source"])
    least = max(row["min"], row.get("needs", 0))
    if capability < least:
        return [_too_old(f"`{scheme.method}`", least, capability, source)]
    refused = check_type(scheme, dtype=dtype, capability=capability)
    found = [refused] if refused is not None else []
    if row.get("deprecated"):
        needed = "a method that the next versions of vLLM keep"
        do = "take a compressed-tensors checkpoint of the same precision when you next change it"
        found.append(Finding("note", _QUANT, needed, f"`{scheme.method}`, deprecated", do, source))
    return found + _check_integers(scheme, row) + _check_format(scheme, capability)


def check_type(scheme: Scheme, *, dtype: str, capability: int | None = None) -> Finding | None:
    """That vLLM does not compute in this type with such weights; None: it does, or nobody knows.

    With a capability, in vLLM's digits, the kernels are judged too; without, the method alone.
    """
    known, name, source = table(), f"`{scheme.method}` takes", "config/vllm.py:908"
    taken = known.methods.get(scheme.method, {}).get("act", [dtype])
    form = known.formats.get(scheme.format) if capability is not None else None
    if form is not None and dtype in taken:
        taken = [one for one in taken if one in known.kernel_act]
        name, source = f"the kernels of {form['name']} take", "_custom_ops.py:800"
    if dtype in taken:
        return None
    able = [one for one in taken if one != "bfloat16" or (capability or 80) >= 80]
    do = f"write dtype: {able[0]}" if able else "take a newer GPU"
    needed = f"a compute type that {name}: {' or '.join(taken)}"
    return Finding("refuse", _DTYPE, needed, dtype, do, source)


def _check_integers(scheme: Scheme, row: Mapping[str, Any]) -> list[Finding]:
    found, source = [], str(row["source"])
    bits = scheme.weights.removeprefix("int")
    if scheme.weights.startswith("int") and bits not in map(str, row.get("bits", [bits])):
        widths = " or ".join(map(str, row["bits"]))
        needed, do = f"weights of {widths} bits for `{scheme.method}`", "take such a checkpoint"
        found.append(Finding("refuse", ("model", "config"), needed, f"{bits} bits", do, source))
    groups = row.get("groups", [scheme.group])
    if scheme.group not in groups:
        close = min((size for size in groups if size > 0), key=lambda n: abs(n - scheme.group))
        needed = (
            f"groups of {', '.join(str(n) for n in groups if n > 0)} weights, or a whole channel"
        )
        do = f"take a checkpoint with group_size {close}"
        where = "model_executor/layers/quantization/utils/marlin_utils.py:37"
        found.append(Finding("refuse", ("model", "config"), needed, str(scheme.group), do, where))
    if scheme.activation_order:
        needed = "a checkpoint without activation order, which vLLM no longer reads"
        do = "take one that was made with desc_act: false or static order"
        where = "model_executor/layers/quantization/utils/gptq_utils.py:34"
        state = f"activation order with groups of {scheme.group}"
        found.append(Finding("refuse", ("model", "config"), needed, state, do, where))
    return found


def _check_format(scheme: Scheme, capability: int) -> list[Finding]:
    row = table().formats.get(scheme.format)
    if row is None:
        return []
    name, source = str(row["name"]), str(row["source"])
    least = row.get("least", {}).get(scheme.method, row["from"])
    if capability < least or capability not in row.get("only", [capability]):
        return [_too_old(name, least, capability, source, exact="only" in row)]
    doubt = row.get("doubt")
    if doubt is not None and capability >= doubt:
        needed = f"a kernel of {name} for capability {_point(capability)}"
        do = "measure a start first, or take an FP8 checkpoint"
        return [Finding("warn", _QUANT, needed, str(row["doubtful"]), do, source)]
    native = row.get("native")
    if native is not None and capability >= native:
        return []
    needed = f"{name} computed as such" + (
        f", from capability {_point(native)} on ({_chips(native)})" if native else ""
    )
    return [
        Finding(
            "note",
            _QUANT,
            needed,
            f"capability {_point(capability)}, with {row['instead']}",
            "",
            source,
        )
    ]


def formats_that_run(capability: int) -> list[str]:
    """Names of the formats that have a kernel on a GPU, those that it computes in first."""
    rows = [
        row
        for row in table().formats.values()
        if row["from"] <= capability < row.get("doubt", capability + 1)
        and capability in row.get("only", [capability])
    ]
    rows.sort(key=lambda row: row.get("native", 10**6) > capability)
    return [str(row["name"]) for row in rows]


def _unknown_method(method: str) -> Finding:
    known = table()
    if method in known.removed:
        do = f"take {known.removed[method]}" if " " in known.removed[method] else (
            f"write {known.removed[method]}"
        )  # fmt: skip
        found = f"`{method}`, which this version no longer has"
    else:
        close = nearest(method, known.methods)
        do = f"write {close}" if close else f"take one of: {', '.join(known.methods)}"
        found = f"`{method}`"
    source = "model_executor/layers/quantization/__init__.py:14"
    return Finding(
        "refuse", _QUANT, f"a quantization method of vLLM {known.vllm}", found, do, source
    )


def _too_old(
    what: str, least: int, capability: int, source: str, *, exact: bool = False
) -> Finding:
    others = [name for name in formats_that_run(capability) if name != what]
    instead = f", or a checkpoint in one of: {', '.join(others[:4])}" if others else ""
    return Finding(
        "refuse",
        _QUANT,
        f"capability {_point(least)}{' exactly' if exact else ' or more'} for {what}",
        f"{_point(capability)} ({_chips(capability)})",
        f"take a GPU like {_chips(least)}{instead}",
        source,
    )


# ── compute type and KV cache ─────────────────────────────────────────────────────────────────────
def _check_dtype(dtype: str, capability: int) -> list[Finding]:
    if dtype != "bfloat16" or capability >= 80:
        return []
    needed, found = "capability 8.0 or more for bfloat16", f"{_point(capability)}"
    do = "write dtype: float16"
    return [Finding("refuse", _DTYPE, needed, found, do, "platforms/cuda.py:256")]


def backends_for(attention: Attention, *, dtype: str, kv: str, capability: int) -> tuple[str, ...]:
    """The attention backends that take all of it, as vLLM asks them one by one."""
    return tuple(
        name
        for name, row in table().attention.items()
        if row["kind"] == attention.kind
        and _takes(row, attention, dtype=dtype, kv=kv, capability=capability)
    )


def chosen_backend(attention: Attention, *, dtype: str, kv: str, capability: int) -> str:
    """The backend that vLLM takes; empty: none takes all of it.

    Where capability begins with 10 FlashInfer is asked first (platforms/cuda.py:158).
    """
    taken = backends_for(attention, dtype=dtype, kv=kv, capability=capability)
    if capability // 10 == 10 and "FLASHINFER" in taken:
        return "FLASHINFER"
    return taken[0] if taken else ""


def kv_cache_dtypes_for(
    attention: Sequence[Attention], *, dtype: str, capability: int
) -> list[str]:
    """The types of KV cache that every layer can use."""
    return [
        kv
        for kv in table().kv_cache_dtypes
        if all(backends_for(a, dtype=dtype, kv=kv, capability=capability) for a in attention)
    ]


def _takes(
    row: Mapping[str, Any], wanted: Attention, *, dtype: str, kv: str, capability: int
) -> bool:
    def holds(rules: Sequence[Mapping[str, Any]]) -> bool:
        return any(_holds(rule, wanted, kv, capability) for rule in rules)

    return (
        _holds(row["capability"], wanted, kv, capability)
        and dtype in row["dtypes"]
        and holds(row["heads"])
        and holds(row["kv"])
        and (not wanted.sinks or holds(row["sinks"]))
        and (not wanted.images or holds(row["images"]))
        and (not wanted.sliding or row.get("sliding", True))
    )


def _holds(rule: Mapping[str, Any], wanted: Attention, kv: str, capability: int) -> bool:
    dim = wanted.head_dim
    return (
        rule.get("least", 0) <= capability <= rule.get("most", capability)
        and capability // 10 in rule.get("majors", [capability // 10])
        and kv in rule.get("types", [kv])
        and dim in rule.get("dims", [dim])
        and dim not in rule.get("not_dims", [])
        and dim % rule.get("step", 1) == 0
        and rule.get("dim_least", 0) <= dim <= rule.get("dim_most", dim)
        and not (rule.get("no_sinks") and wanted.sinks)
        and not (rule.get("no_images") and wanted.images)
    )


def _check_kv(
    schemes: Sequence[Scheme], dtype: str, kv: str, layers: Sequence[Attention], capability: int
) -> list[Finding]:
    known = table()
    if kv not in known.kv_cache_dtypes:
        usual = {"fp16": "float16", "bf16": "bfloat16", "half": "float16"}
        close = usual.get(kv) or nearest(kv, known.kv_cache_dtypes) or "auto"
        needed = f"a kv_cache_dtype of vLLM {known.vllm}"
        return [Finding("refuse", _KV, needed, f"`{kv}`", f"write {close}", "config/cache.py:39")]
    blocked = _scales_conflict(schemes, kv)
    if blocked is not None:
        return [blocked]
    for layer in dict.fromkeys(layers):
        taken = backends_for(layer, dtype=dtype, kv=kv, capability=capability)
        if not taken:
            return [_no_backend(layer, layers, dtype=dtype, kv=kv, capability=capability)]
        if kv.startswith("fp8") and taken[0] == "FLASHINFER" and capability < 90:
            needed = "the usual FLASH_ATTN backend for the KV cache"
            found = f"{_point(capability)}: it reads 16 bits alone here, so {kv} runs in FLASHINFER"
            source = "v1/attention/backends/fa_utils.py:282"
            return [Finding("note", _KV, needed, found, "", source)]
    return []


def _scales_conflict(schemes: Sequence[Scheme], kv: str) -> Finding | None:
    """fp8_e5m2 beside a checkpoint that carries scales for its KV cache."""
    for scheme in schemes if kv == "fp8_e5m2" else ():
        scales = table().methods.get(scheme.method, {}).get("scales")
        if scales == "always" or (scales == "declared" and scheme.declares_kv_scales):
            needed = f"fp8_e4m3 or auto beside a checkpoint in `{scheme.method}`"
            source = "model_executor/layers/attention/attention.py:219"
            return Finding("refuse", _KV, needed, "fp8_e5m2", "write fp8_e4m3, or auto", source)
    return None


def _no_backend(
    layer: Attention, layers: Sequence[Attention], *, dtype: str, kv: str, capability: int
) -> Finding:
    name = KIND_NAMES[layer.kind]
    has = [text for text, there in (("sinks", layer.sinks), ("images", layer.images)) if there]
    what = f"{name} of head dim {layer.head_dim}" + (f" with {' and '.join(has)}" if has else "")
    here = f"{_point(capability)} ({_chips(capability)})"
    source = "platforms/cuda.py:471"
    works = kv_cache_dtypes_for(layers, dtype=dtype, capability=capability)
    if works:
        rest = [item for item in works if item not in ("auto", "float16", "bfloat16")]
        do = "write auto" + (f", or one of: {', '.join(rest)}" if rest else "")
        return Finding("refuse", _KV, f"a backend that keeps {kv} for {what}",
                       f"none for {here}", do, source)  # fmt: skip
    rows = [row for row in table().attention.values() if row["kind"] == layer.kind]
    able = [
        chip
        for chip in table().chips
        if any(_takes(row, layer, dtype=dtype, kv="auto", capability=chip) for row in rows)
    ]
    do = f"take a GPU like {_chips(able[0])}" if able else "take a model with another head dim"
    if backends_for(layer, dtype="bfloat16", kv="auto", capability=capability):
        return Finding("refuse", _DTYPE, f"a compute type that a backend has for {what} on {here}",
                       dtype, "write dtype: bfloat16", source)  # fmt: skip
    return Finding("refuse", ("node_pools",), f"a backend for {what} in {dtype}",
                   f"none for {here}", do, source)  # fmt: skip


def _point(capability: int) -> str:
    return f"{capability // 10}.{capability % 10}"


def _chips(capability: int) -> str:
    """Names of GPUs with this capability, or the next below it."""
    known = table().chips
    return known[max((chip for chip in known if chip <= capability), default=min(known))]
