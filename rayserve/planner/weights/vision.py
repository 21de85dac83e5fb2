"""Which modules do the vision tower and its projector add to a model?

Each function follows the model file in vllm/model_executor/models (0.32.0). Where a config says
nothing of its tower, `PUBLISHED` stands in: the `vision_config` of the family's published
checkpoints, as recalled; the plan then says what it assumed. Start-up logs agree with those of
gemma3, granite_vision, kimi_vl, llama4 and mistral3 (within 0.03 %); the others were not checked.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from rayserve.planner.support.figures import MOST_LAYERS
from rayserve.planner.weights.blocks import FLOAT32
from rayserve.planner.weights.facts import Facts
from rayserve.planner.weights.modules import (
    COLUMNS,
    ROWS,
    Linear,
    Module,
    Tensor,
    mlp_modules,
    norm,
)

Tower = Callable[[Facts, Facts, int], list[Module]]
"""(vision config, whole config, hidden size of the language model) -> modules."""

SIGLIP = {
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "image_size": 896,
    "patch_size": 14,
}
QWEN3_VISION = {
    "depth": 27,
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_heads": 16,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "num_position_embeddings": 2304,
}
MOON_VISION = {
    **{key: value for key, value in SIGLIP.items() if key != "image_size"},
    "init_pos_emb_height": 64,
    "init_pos_emb_width": 64,
}
PUBLISHED: Mapping[str, Mapping[str, Any]] = {
    "llava": {
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "image_size": 336,
        "patch_size": 14,
    },
    "internvl": {
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "image_size": 448,
        "patch_size": 14,
        "qkv_bias": True,
    },
    "gemma3": SIGLIP,
    "granite_vision": {**SIGLIP, "image_size": 384},
    "kimi_vl": MOON_VISION,
    "kimi_k25": MOON_VISION,
    "mistral3": {
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "image_size": 1540,
        "patch_size": 14,
    },
    "llama4": {
        "hidden_size": 1408,
        "intermediate_size": 5632,
        "num_hidden_layers": 34,
        "num_attention_heads": 16,
        "image_size": 336,
        "patch_size": 14,
        "vision_output_dim": 4096,
        "projector_input_dim": 4096,
        "projector_output_dim": 4096,
    },
    "qwen3_vl": {**QWEN3_VISION, "deepstack_visual_indexes": (8, 16, 24)},
    "qwen3_5": QWEN3_VISION,
    "qwen2_5_vl": {
        "depth": 32,
        "hidden_size": 1280,
        "intermediate_size": 3420,
        "num_heads": 16,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    },
    "qwen2_vl": {
        "depth": 32,
        "embed_dim": 1280,
        "mlp_ratio": 4,
        "num_heads": 16,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    },
    "gemma4": {
        "hidden_size": 1152,
        "intermediate_size": 4304,
        "num_hidden_layers": 27,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "head_dim": 72,
        "patch_size": 16,
        "position_embedding_size": 10240,
    },
}


def depth(vision: Facts) -> int:
    """Layers of a tower."""
    return vision.count("num_hidden_layers", "depth", most=MOST_LAYERS)


def encoder_layer(
    name: str,
    hidden: int,
    width: int,
    *,
    bias: bool,
    qkv_bias: bool | None = None,
    gated: bool = False,
    norm_bias: bool = True,
    names: tuple[str, str, str, str] = ("self_attn.qkv_proj", "self_attn.out_proj", "fc1", "fc2"),
) -> list[Module]:
    """Attention with as many KV heads as query heads, an MLP and two norms."""
    qkv, out, up, down = names
    modules: list[Module] = [
        Linear(
            f"{name}.{qkv}",
            hidden,
            (hidden, hidden, hidden),
            COLUMNS,
            parts=("q_proj", "k_proj", "v_proj"),
            bias=bias if qkv_bias is None else qkv_bias,
        ),
        Linear(f"{name}.{out}", hidden, (hidden,), ROWS, bias=bias),
        *mlp_modules(f"{name}.mlp", hidden, width, gated=gated, bias=bias, names=(up, down)),
    ]
    for title in ("layer_norm1", "layer_norm2"):
        modules += norm(f"{name}.{title}", hidden, bias=norm_bias)
    return modules


def convolution(name: str, hidden: int, pixels: int, *, bias: bool) -> list[Module]:
    """The patch embedding, a convolution that is whole on every rank."""
    modules: list[Module] = [Tensor(f"{name}.weight", hidden * pixels)]
    if bias:
        modules.append(Tensor(f"{name}.bias", hidden))
    return modules


def siglip(vision: Facts, *, layers: int, post_norm: bool) -> list[Module]:
    """The SigLIP encoder, up to the deepest layer that is asked for."""
    hidden, width = vision.count("hidden_size"), vision.count("intermediate_size")
    patch, image = vision.count("patch_size"), vision.count("image_size")
    name = "vision_tower.vision_model"
    modules = convolution(f"{name}.embeddings", hidden, 3 * patch**2, bias=True)
    modules.append(Tensor(f"{name}.position", (image // patch) ** 2 * hidden))
    for index in range(layers):
        modules += encoder_layer(f"{name}.encoder.layers.{index}", hidden, width, bias=True)
    if post_norm:
        modules += norm(f"{name}.post_layernorm", hidden, bias=True)
    return modules


def gemma3(vision: Facts, _whole: Facts, text: int) -> list[Module]:
    """SigLIP, and a projection that is whole on every rank."""
    hidden = vision.count("hidden_size")
    return [
        *siglip(vision, layers=depth(vision), post_norm=True),
        Tensor("multi_modal_projector.mm_input_projection_weight", hidden * text),
        Tensor("multi_modal_projector.mm_soft_emb_norm.weight", hidden),
    ]


def llava_next(vision: Facts, whole: Facts, text: int) -> list[Module]:
    """Granite Vision and other LLaVA-NeXT models on SigLIP; several layers may feed the projector."""
    asked = whole.data.get("vision_feature_layer", -2)
    chosen = tuple(asked) if isinstance(asked, list | tuple) else (asked,)
    if not all(isinstance(at, int) and not isinstance(at, bool) for at in chosen):
        raise whole.wrong("vision_feature_layer", "layer numbers", asked)
    layers = depth(vision)
    deepest = max(layers + at + 1 if at < 0 else at for at in chosen)
    width = vision.count("hidden_size") * len(chosen)
    bias = whole.flag("multimodal_projector_bias", default=True)
    name = "multi_modal_projector"
    return [
        *siglip(vision, layers=max(0, min(layers, deepest)), post_norm=False),
        Tensor("image_newline", text),
        Linear(f"{name}.linear_1", width, (text,), COLUMNS, bias=bias),
        Linear(f"{name}.linear_2", text, (text,), ROWS, bias=bias),
    ]


def kimi_vl(vision: Facts, _whole: Facts, text: int) -> list[Module]:
    """MoonViT, and a projector that is whole on every rank."""
    hidden, width = vision.count("hidden_size"), vision.count("intermediate_size")
    modules = convolution(
        "vision_tower.patch_embed.proj", hidden, 3 * vision.count("patch_size") ** 2, bias=True
    )
    grid = vision.count("init_pos_emb_height") * vision.count("init_pos_emb_width")
    modules.append(Tensor("vision_tower.patch_embed.pos_emb.weight", grid * hidden))
    for index in range(depth(vision)):
        name = f"vision_tower.encoder.blocks.{index}"
        names = ("wqkv", "wo", "fc0", "fc1")
        modules += encoder_layer(name, hidden, width, bias=True, names=names)
    merged = hidden * 4
    modules += norm("vision_tower.encoder.final_layernorm", hidden, bias=True)
    modules += norm("multi_modal_projector.pre_norm", hidden, bias=True)
    return [
        *modules,
        Linear("multi_modal_projector.linear_1", merged, (merged,), bias=True),
        Linear("multi_modal_projector.linear_2", merged, (text,), bias=True),
    ]


def mistral3(vision: Facts, whole: Facts, text: int) -> list[Module]:
    """Pixtral, a patch merger and two projections."""
    hidden, width = vision.count("hidden_size"), vision.count("intermediate_size")
    patch, image = vision.count("patch_size"), vision.count("image_size")
    modules = convolution("vision_tower.patch_conv", hidden, 3 * patch**2, bias=False)
    modules += norm("vision_tower.ln_pre", hidden)
    for index in range(depth(vision)):
        modules += encoder_layer(
            f"vision_tower.transformer.layers.{index}",
            hidden,
            width,
            bias=False,
            gated=True,
            norm_bias=False,
            names=("attention.qkv_proj", "attention.o_proj", "up_proj", "down_proj"),
        )
    head = hidden // vision.count("num_attention_heads")
    modules.append(Tensor("vision_tower.rotary", (image // patch) ** 2 * head, element_bytes=4))
    merge = whole.count("spatial_merge_size", default=2) ** 2
    bias = whole.flag("multimodal_projector_bias", default=False)
    name = "multi_modal_projector"
    return [
        *modules,
        *norm(f"{name}.norm", hidden),
        Tensor(f"{name}.patch_merger.merging_layer.weight", merge * hidden * hidden),
        Linear(f"{name}.linear_1", hidden, (text,), COLUMNS, bias=bias),
        Linear(f"{name}.linear_2", text, (text,), ROWS, bias=bias),
    ]


def llama4(vision: Facts, _whole: Facts, text: int) -> list[Module]:
    """Llama 4's encoder with its pixel shuffle, and the projection."""
    hidden, width = vision.count("hidden_size"), vision.count("intermediate_size")
    patch, image = vision.count("patch_size"), vision.count("image_size")
    inner, out = vision.count("projector_input_dim"), vision.count("projector_output_dim")
    patches = (image // patch) ** 2 + 1
    modules: list[Module] = [
        Linear("vision_model.patch_embedding.linear", 3 * patch**2, (hidden,), COLUMNS),
        Tensor("vision_model.class_embedding", hidden),
        Tensor("vision_model.positional_embedding_vlm", patches * hidden),
    ]
    for title in ("layernorm_pre", "layernorm_post"):
        modules += norm(f"vision_model.{title}", hidden, bias=True)
    for index in range(depth(vision)):
        modules += encoder_layer(f"vision_model.model.layers.{index}", hidden, width, bias=True)
    head = hidden // vision.count("num_attention_heads")
    return [
        *modules,
        # complex numbers of 8 bytes, a quarter of a head for either axis
        Tensor("vision_model.rotary", patches * (head // 2), element_bytes=8),
        Linear("vision_model.vision_adapter.mlp.fc1", width, (inner,), COLUMNS),
        Linear("vision_model.vision_adapter.mlp.fc2", inner, (out,), ROWS),
        Linear(
            "multi_modal_projector.linear_1",
            vision.count("vision_output_dim"),
            (text,),
            COLUMNS,
        ),
    ]


def qwen_vl(vision: Facts, _whole: Facts, text: int) -> list[Module]:
    """Qwen 2-VL, 2.5-VL, 3-VL and 3.5: a transformer on patches of time and space, and mergers.

    The 2.5 tower has gated MLPs and RMSNorms; the 3 tower learned positions and, for deep stacking,
    several mergers.
    """
    hidden = vision.count("embed_dim", "hidden_size")
    width = vision.optional("intermediate_size") or hidden * vision.count("mlp_ratio")
    patch, frames = vision.count("patch_size"), vision.count("temporal_patch_size", default=2)
    learned = vision.optional("num_position_embeddings")
    gated = not learned and not vision.has("embed_dim")
    modules = convolution(
        "visual.patch_embed.proj", hidden, 3 * frames * patch**2, bias=bool(learned)
    )
    if learned:
        modules.append(Tensor("visual.pos_embed.weight", learned * hidden))
    for index in range(depth(vision)):
        modules += encoder_layer(
            f"visual.blocks.{index}",
            hidden,
            width,
            bias=True,
            gated=gated,
            norm_bias=not gated,
            names=("attn.qkv", "attn.proj", "linear_fc1", "down_proj" if gated else "linear_fc2"),
        )
    merged = hidden * vision.count("spatial_merge_size", default=2) ** 2
    out = vision.optional("out_hidden_size") or text
    deep = len(vision.counts("deepstack_visual_indexes"))
    for at in range(1 + deep):
        name = "visual.merger" if at == 0 else f"visual.deepstack_merger_list.{at - 1}"
        modules += norm(f"{name}.norm", merged if at else hidden, bias=not gated)
        modules += [
            Linear(f"{name}.linear_fc1", merged, (merged,), COLUMNS, bias=True),
            Linear(f"{name}.linear_fc2", merged, (out,), ROWS, bias=True),
        ]
    return modules


def gemma4(vision: Facts, _whole: Facts, text: int) -> list[Module]:
    """Gemma 4's tower, built by Transformers: whole on every rank, never quantized."""
    hidden, width = vision.count("hidden_size"), vision.count("intermediate_size")
    head = vision.count("head_dim")
    queries = vision.count("num_attention_heads") * head
    keys = vision.count("num_key_value_heads") * head
    patch = vision.count("patch_size")
    positions = 2 * vision.count("position_embedding_size") * hidden
    modules: list[Module] = [
        Tensor("vision_tower.patch_embedder.input_proj", 3 * patch**2 * hidden),
        Tensor("vision_tower.patch_embedder.position_embedding_table", positions),
    ]
    sizes = (queries, keys, keys, queries, width, width, width)
    for index in range(depth(vision)):
        name = f"vision_tower.encoder.layers.{index}"
        modules += [Tensor(f"{name}.linear{at}", hidden * s) for at, s in enumerate(sizes)]
        modules += [Tensor(f"{name}.norm{at}", hidden) for at in range(4)]
        modules += [Tensor(f"{name}.{title}_norm", head) for title in ("q", "k")]
    projection = Linear("embed_vision.embedding_projection", hidden, (text,), quantizable=False)
    return [*modules, projection, Tensor("vision_tower.std", 2 * hidden, element_bytes=FLOAT32)]
