"""In which format is each matrix of a checkpoint stored, and which matrices stay as they were?

Reads `quantization_config` of a config.json, in the spelling of every method that vLLM 0.32.0 loads,
and the engine's `--quantization` flag for what it quantizes while it loads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from rayserve.errors import SpecError
from rayserve.planner.support import schemes
from rayserve.planner.weights.facts import Facts, UnknownModelError
from rayserve.planner.weights.module_names import EXACT, PART, WILDCARD, Names
from rayserve.planner.weights.storage import (
    AWQ,
    BLOCK,
    CHANNEL,
    FP8,
    GPTQ,
    GROUP,
    INT8,
    MXFP4,
    NVFP4,
    PACKED,
    TENSOR,
    Storage,
)

GROUP_LIMIT = 2**20
ONLINE = {
    "fp8": TENSOR,
    "fp8_per_tensor": TENSOR,
    "fp8_per_channel": CHANNEL,
    "fp8_per_block": BLOCK,
}
"""`--quantization` values that turn a plain checkpoint into FP8, and their scales."""
RENAMED = {
    "gptq_marlin": "gptq",
    "auto_gptq": "gptq",
    "awq_marlin": "awq",
    "auto_awq": "awq",
    "auto-round": "inc",
    "auto_round": "inc",
    "compressed_tensors": "compressed-tensors",
    "gpt_oss_mxfp4": "mxfp4",
    "modelopt_fp4": "modelopt",
    "modelopt_mixed": "modelopt",
}


@dataclass(frozen=True, slots=True)
class Quantization:
    """A checkpoint's formats."""

    method: str
    groups: tuple[tuple[tuple[str, ...], Storage | None], ...]
    """(targets, storage), the first match wins; the target "Linear" matches every matrix."""
    ignored: tuple[str, ...] = ()
    matching: str = EXACT
    experts_only: bool = False
    head: bool = False
    """The output head is quantized too."""
    _found: dict[tuple[str, tuple[str, ...], bool], Storage | None] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    _names: dict[int, Names] = field(default_factory=dict, init=False, repr=False, compare=False)
    """Of each tuple of this object, by its identity: a list of every expert is long to hash."""

    def storage(
        self, name: str, parts: tuple[str, ...] = (), *, expert: bool = False
    ) -> Storage | None:
        """The format of a matrix; None where it stays unquantized.

        A fused matrix is left alone when the parts it is made of are (`is_layer_skipped` of
        vllm/model_executor/layers/quantization/utils/quant_utils.py).
        """
        key = (name, parts, expert)
        if key not in self._found:
            self._found[key] = self._look_up(name, parts, expert=expert)
        return self._found[key]

    def _look_up(self, name: str, parts: tuple[str, ...], *, expert: bool) -> Storage | None:
        if self.experts_only and not expert:
            return None
        stem, _, last = name.rpartition(".")
        whole = [f"{stem}.{part}" for part in parts] or [name]
        if expert:
            # AWQ and GPTQ ask for the experts by their own name alone: the router's "gate" in a list
            # does not mean the `gate_proj` of an expert.
            whole = [name] if self.matching == PART else [f"{name}.0.{part}" for part in parts]
        if self._matches(name, self.ignored) or any(self._matches(x, self.ignored) for x in whole):
            return None
        for targets, storage in self.groups:
            if "Linear" in targets or any(self._matches(x, targets) for x in (name, *whole)):
                return storage
            if expert and "FusedMoE" in targets:
                return storage
            if last in targets:
                return storage
        return None

    def _matches(self, name: str, patterns: tuple[str, ...]) -> bool:
        if not patterns:
            return False
        known = self._names.get(id(patterns))
        if known is None:
            known = self._names[id(patterns)] = Names(patterns, self.matching)
        return known.match(name)


def read_quantization(facts: Facts, flag: str = "") -> Quantization | None:
    """The formats of a checkpoint; None where it is not quantized.

    Args:
        facts: the whole config.json.
        flag: the engine's `--quantization`, empty where it is not given.

    Raises:
        UnknownModelError: a method or a format that the planner cannot lay out.
        SpecError: a figure that cannot be.
    """
    stated = facts.inner("quantization_config", "compression_config")
    text = facts.inner("text_config")
    if stated is None and text is not None:
        stated = text.inner("quantization_config")
    if stated is None:
        return _online(flag, facts)
    method = stated.text("quant_method").lower()
    method = RENAMED.get(method, method)
    readers = {
        "fp8": _fp8,
        "fbgemm_fp8": _fbgemm,
        "compressed-tensors": _compressed,
        "awq": _packed,
        "gptq": _packed,
        "inc": _packed,
        "mxfp4": _mxfp4,
        "modelopt": _modelopt,
        "quark": _quark,
    }
    if method not in readers:
        raise _unknown(f"`{method or 'none'}` as quant_method", facts)
    return readers[method](stated)


def _unknown(found: str, facts: Facts) -> UnknownModelError:
    return UnknownModelError(
        "a format of the weights that the planner knows",
        found=found,
        do="give the checkpoint's folder: the headers of its files hold the exact sizes",
        where=facts.where,
    )


def _online(flag: str, facts: Facts) -> Quantization | None:
    if not flag or flag in {"none", "auto"}:
        return None
    if flag not in schemes.ONLINE:
        # get_quant_config of model_loader/weight_utils.py finds no file that describes the format
        raise SpecError(
            f"a checkpoint that is quantized with {flag}",
            found="a config.json without quantization_config",
            do="take such a checkpoint, or write one of: " + ", ".join(sorted(schemes.ONLINE)),
            where=facts.where,
        )
    if flag not in ONLINE:
        raise _unknown(f"`--quantization {flag}` and a config.json without quantization", facts)
    scale = ONLINE[flag]
    block = (128, 128) if scale == BLOCK else (0, 0)
    return Quantization(flag, ((("Linear",), Storage(FP8, scale, block=block, online=True)),))


def _ignored(stated: Facts) -> tuple[str, ...]:
    names = ("ignored_layers", "modules_to_not_convert", "ignore", "exclude_modules", "exclude")
    return tuple(word for name in names for word in stated.words(name))


def _fp8(stated: Facts) -> Quantization:
    block = stated.counts("weight_block_size", least=1)
    if block and len(block) != 2:
        raise stated.wrong("weight_block_size", "two whole numbers", block)
    static = stated.text("activation_scheme", "dynamic") == "static"
    storage = Storage(FP8, TENSOR, static_input=static)
    if block:
        storage = Storage(FP8, BLOCK, block=(block[0], block[1]))
    return Quantization("fp8", ((("Linear",), storage),), _ignored(stated))


def _fbgemm(stated: Facts) -> Quantization:
    return Quantization("fbgemm_fp8", ((("Linear",), Storage(FP8, CHANNEL)),), _ignored(stated))


def _packed(stated: Facts) -> Quantization:
    """GPTQ, AWQ, and what AutoRound writes in either layout."""
    method = RENAMED.get(stated.text("quant_method").lower(), stated.text("quant_method").lower())
    bits = stated.count("bits", "w_bit", most=8)
    group = _group_size(stated)
    packing = stated.text("packing_format", stated.text("backend"))
    awq = method == "awq" or "awq" in packing
    zeros = stated.flag("zero_point", default=True) if awq else not stated.flag("sym", default=True)
    storage = Storage(
        PACKED, GROUP, bits=bits, group=group, zero_points=zeros, layout=AWQ if awq else GPTQ
    )
    head = stated.flag("lm_head", default=False)
    groups = (*_overrides(stated, storage), (_quantized_parts(stated), storage))
    return Quantization(method, groups, _ignored(stated), PART, head=head)


def _group_size(stated: Facts) -> int:
    """Inputs that share a scale; 0 where the file says -1: all of them."""
    given = stated.data.get("group_size", stated.data.get("q_group_size"))
    return 0 if given == -1 else stated.optional("group_size", "q_group_size", most=GROUP_LIMIT)


def _quantized_parts(stated: Facts) -> tuple[str, ...]:
    """Parts of a layer that GPTQ was applied to, and experts, which vLLM does not look up in the list
    (`get_moe_quant_method` of auto_gptq.py); without a list, all of them.
    """
    raw = stated.data.get("modules_in_block_to_quantize")
    if raw is None:
        return ("Linear",)
    rows = raw if isinstance(raw, list) else [raw]
    names = [name for row in rows for name in (row if isinstance(row, list) else [row])]
    if not names or not all(isinstance(name, str) for name in names):
        raise stated.wrong("modules_in_block_to_quantize", "a list of module names", raw)
    return (*names, "FusedMoE")


def _overrides(
    stated: Facts, storage: Storage
) -> tuple[tuple[tuple[str, ...], Storage | None], ...]:
    """GPTQModel's `dynamic`: "-:pattern" leaves modules as they are, others change bits or group
    (get_dynamic_override of quantization/utils/gptq_utils.py).
    """
    rules = stated.inner("dynamic")
    found: list[tuple[tuple[str, ...], Storage | None]] = []
    for pattern in rules.data if rules is not None else ():
        own = rules.inner(str(pattern)) if rules is not None else None
        text = str(pattern)
        if text.startswith("-:"):
            found.append(((f"re:{text[2:]}",), None))
        elif own is not None:
            bits = own.count("bits", default=storage.bits, most=8)
            group = _group_size(own) if own.has("group_size") else storage.group
            changed = replace(storage, bits=bits, group=group)
            found.append(((f"re:{text.removeprefix('+:')}",), changed))
    return tuple(found)


def _mxfp4(stated: Facts) -> Quantization:
    storage = Storage(MXFP4, GROUP, bits=4, group=32)
    groups = ((("Linear",), storage),)
    return Quantization("mxfp4", groups, _ignored(stated), WILDCARD, experts_only=True)


MODELOPT = {
    "FP8": Storage(FP8, TENSOR, static_input=True),
    "FP8_PER_CHANNEL_PER_TOKEN": Storage(FP8, CHANNEL),
    "FP8_PB_WO": Storage(FP8, BLOCK, block=(128, 128)),
    "NVFP4": Storage(NVFP4, GROUP, bits=4, group=16, static_input=True),
    "W4A16_NVFP4": Storage(NVFP4, GROUP, bits=4, group=16),
}


def _modelopt(stated: Facts) -> Quantization:
    inner = stated.inner("quantization") or stated
    algorithm = inner.text("quant_algo", stated.text("quant_algo")).upper()
    ignored = (*_ignored(stated), *_ignored(inner))
    if algorithm == "MIXED_PRECISION":
        return _mixed(inner, ignored)
    if algorithm not in MODELOPT:
        raise _unknown(f"`{algorithm}` as quant_algo of modelopt", stated)
    groups = ((("Linear",), MODELOPT[algorithm]),)
    return Quantization("modelopt", groups, ignored, WILDCARD)


def _mixed(stated: Facts, ignored: tuple[str, ...]) -> Quantization:
    """A format for each matrix that is named; the others stay as they were
    (ModelOptMixedPrecisionConfig).
    """
    layers = stated.inner("quantized_layers")
    if layers is None or not layers.data:
        raise _unknown("MIXED_PRECISION of modelopt without quantized_layers", stated)
    named: dict[str, list[str]] = {}
    for name in layers.data:
        entry = layers.inner(str(name))
        algorithm = entry.text("quant_algo").upper() if entry is not None else ""
        if algorithm not in MODELOPT:
            raise _unknown(f"`{algorithm}` for `{str(name)[:60]}` of modelopt", stated)
        named.setdefault(algorithm, []).append(str(name))
    groups = tuple((tuple(names), MODELOPT[kind]) for kind, names in sorted(named.items()))
    return Quantization("modelopt", groups, ignored, WILDCARD, head="lm_head" in layers.data)


def _quark(stated: Facts) -> Quantization:
    wanted = stated.inner("global_quant_config")
    weight = wanted.inner("weight") if wanted is not None else None
    kind = weight.text("dtype") if weight is not None else "fp8_e4m3"
    shape = weight.text("qscheme", "per_tensor") if weight is not None else "per_tensor"
    if kind not in {"fp8_e4m3", "int8"}:
        raise _unknown(f"`{kind}` as weights of quark", stated)
    scale = TENSOR if shape == "per_tensor" else CHANNEL
    storage = Storage(FP8 if kind == "fp8_e4m3" else INT8, scale, static_input=kind == "fp8_e4m3")
    return Quantization("quark", ((("Linear",), storage),), _ignored(stated), WILDCARD)


def _compressed(stated: Facts) -> Quantization:
    raw = stated.inner("config_groups")
    if raw is None or not raw.data:
        raise _unknown("compressed-tensors without config_groups", stated)
    groups = []
    for name in raw.data:
        group = raw.inner(str(name))
        if group is None:
            continue
        targets = group.words("targets") or ("Linear",)
        groups.append((targets, _group_storage(group, stated)))
    return Quantization("compressed-tensors", tuple(groups), _ignored(stated))


def _group_storage(group: Facts, stated: Facts) -> Storage | None:
    weights = group.inner("weights")
    if weights is None:
        return None
    bits, kind = weights.count("num_bits", default=8, most=16), weights.text("type", "int")
    strategy = weights.text("strategy", CHANNEL)
    given = weights.data.get("group_size")
    size = 0 if given == -1 else weights.optional("group_size", most=GROUP_LIMIT)
    zeros = not weights.flag("symmetric", default=True)
    inputs = group.inner("input_activations")
    static = inputs is not None and not _dynamic(inputs.data)
    if kind == "float" and bits == 8:
        block = weights.counts("block_structure", least=1)
        if strategy == BLOCK and len(block) != 2:
            raise weights.wrong("block_structure", "two whole numbers", block)
        shape = (block[0], block[1]) if strategy == BLOCK else (0, 0)
        return Storage(FP8, strategy, block=shape, static_input=static)
    if kind == "float" and bits == 4:
        if size == 32:
            return Storage(MXFP4, GROUP, bits=4, group=32)
        return Storage(NVFP4, GROUP, bits=4, group=16, static_input=inputs is not None)
    if kind == "int" and bits == 8 and inputs is not None:
        return Storage(INT8, strategy if strategy == TENSOR else CHANNEL, static_input=static)
    if kind == "int" and bits in {4, 8}:
        return Storage(PACKED, GROUP, bits=bits, group=size, zero_points=zeros)
    raise _unknown(f"weights of {bits} bits ({kind}) in compressed-tensors", stated)


def _dynamic(inputs: Mapping[str, object]) -> bool:
    return bool(inputs.get("dynamic", False))
