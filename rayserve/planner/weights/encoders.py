"""Which modules do the towers of LLaVA and InternVL add, whose language model may be of any family?"""

from __future__ import annotations

from rayserve.planner.weights.facts import Facts
from rayserve.planner.weights.modules import COLUMNS, ROWS, Linear, Module, Tensor, norm
from rayserve.planner.weights.vision import convolution, depth, encoder_layer


def llava(vision: Facts, whole: Facts, text: int) -> list[Module]:
    """LLaVA 1.5: CLIP up to the layer that is asked for, and two projections (llava.py, clip.py)."""
    hidden, width = vision.count("hidden_size"), vision.count("intermediate_size")
    patch, image = vision.count("patch_size"), vision.count("image_size")
    asked = whole.data.get("vision_feature_layer", -2)
    if isinstance(asked, bool) or not isinstance(asked, int):
        raise whole.wrong("vision_feature_layer", "a layer number", asked)
    layers = depth(vision) + asked + 1 if asked < 0 else asked
    name = "vision_tower.vision_model"
    modules = convolution(f"{name}.embeddings", hidden, 3 * patch**2, bias=False)
    modules.append(Tensor(f"{name}.class", hidden))
    modules.append(Tensor(f"{name}.position", ((image // patch) ** 2 + 1) * hidden))
    modules += norm(f"{name}.pre_layrnorm", hidden, bias=True)
    for index in range(max(0, min(layers, depth(vision)))):
        modules += encoder_layer(f"{name}.encoder.layers.{index}", hidden, width, bias=True)
    bias = whole.flag("multimodal_projector_bias", default=True)
    return [
        *modules,
        Linear("multi_modal_projector.linear_1", hidden, (text,), COLUMNS, bias=bias),
        Linear("multi_modal_projector.linear_2", text, (text,), ROWS, bias=bias),
    ]


def internvl(vision: Facts, whole: Facts, text: int) -> list[Module]:
    """InternViT and a projection that is whole on every rank (internvl.py, intern_vit.py)."""
    hidden, width = vision.count("hidden_size"), vision.count("intermediate_size")
    patch, image = vision.count("patch_size"), vision.count("image_size")
    name, plain = "vision_model", vision.text("norm_type", "layer_norm") == "layer_norm"
    chosen = whole.data.get("select_layer", -1)
    if isinstance(chosen, bool) or not isinstance(chosen, int):
        raise whole.wrong("select_layer", "a layer number", chosen)
    layers = depth(vision) + chosen + 1 if chosen < 0 else chosen + 1
    modules = convolution(f"{name}.embeddings", hidden, 3 * patch**2, bias=True)
    modules.append(Tensor(f"{name}.class", hidden))
    modules.append(Tensor(f"{name}.position", ((image // patch) ** 2 + 1) * hidden))
    bias = vision.flag("qkv_bias", default=False)
    for index in range(max(0, min(layers, depth(vision)))):
        path = f"{name}.encoder.layers.{index}"
        made = encoder_layer(path, hidden, width, bias=True, qkv_bias=bias, norm_bias=plain)
        modules += made
        modules += [Tensor(f"{path}.{title}", hidden) for title in ("ls1", "ls2")]
        if vision.flag("qk_normalization", default=False):
            modules += [Tensor(f"{path}.{title}_norm", hidden) for title in ("q", "k")]
    merged = hidden * round(1 / whole.number("downsample_ratio", 0.5, most=1)) ** 2
    return [
        *modules,
        *norm("mlp1.0", merged, bias=True),
        Tensor("mlp1.1.weight", merged * text),
        Tensor("mlp1.1.bias", text),
        Tensor("mlp1.3.weight", text * text),
        Tensor("mlp1.3.bias", text),
    ]
