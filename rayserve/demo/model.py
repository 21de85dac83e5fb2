"""How is the demo's model made, with nothing downloaded and the same bytes on every run?

A Llama of 3.7 million parameters with random weights from a fixed seed, and a byte-level BPE
tokenizer that learns its merges from `corpus.py`. It answers with words in no order, but it is a
whole model: every part of the serving path treats it as it would treat a large one.

Two choices make it a good stand-in. Eight attention heads of 32 let it run on up to eight tensor
parallel ranks (32 is the smallest head that vLLM's CPU attention takes). And one dimension of the
residual stream is constant, which turns a column of the output matrix into a bias: it keeps the
model from ever choosing special tokens, white space or pieces of a character, so that an answer is
readable, has exactly the requested number of tokens, and each token is text. Where a grammar leaves
only the end or white space (after a JSON answer), it prefers the end.

    python -m rayserve.demo.model DIRECTORY
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rayserve.demo.corpus import CORPUS
from rayserve.errors import HostError

if TYPE_CHECKING:
    import numpy
    from numpy.typing import NDArray
    from tokenizers import Tokenizer

MAKER_VERSION = 2
"""Raised when the code below changes the bytes that it writes."""

SEED = 20240229
STAMP_FILE = "rayserve-demo-model.json"

EMBEDDING_STD = 1.0
MATRIX_STD = 0.06
"""Close to 1/sqrt(hidden_size): each matrix keeps the size of what it is given."""
OUTPUT_STD = 0.1
"""Gives logits a standard deviation of about 1.6: neither flat nor certain."""
CONSTANT = 4.0
"""Value of the constant dimension 0 in every embedding."""
BAN, BLANK, END = -30.0, -8.0, -5.0
"""Weights from the constant dimension, which is about 2 in the end, to tokens that are never to be
chosen, to white space and to the end of the answer. END costs less than BLANK; either is chosen only
where a grammar forbids the rest."""

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MARKUP_TOKENS = ("<tool_call>", "</tool_call>", "<think>", "</think>")
"""One token each, but text: tool and reasoning parsers look for them in the answer."""

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "dtype": "bfloat16",
    "eos_token_id": 2,
    "head_dim": 32,
    "hidden_act": "silu",
    "hidden_size": 256,
    "initializer_range": 0.02,
    "intermediate_size": 512,
    "max_position_embeddings": 4096,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 8,
    "num_hidden_layers": 4,
    "num_key_value_heads": 8,
    "pad_token_id": 0,
    "rms_norm_eps": 1e-05,
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    "tie_word_embeddings": False,
    "use_cache": True,
    "vocab_size": 2048,
}
"""The architecture; `inventories/demo/model/config.json` is the same."""

GENERATION_CONFIG: dict[str, Any] = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}

CHAT_TEMPLATE = """\
{%- macro text(content) -%}
{%- if content is string -%}{{ content }}
{%- elif content -%}
{%- for part in content -%}{%- if part.type == 'text' -%}{{ part.text }}{%- endif -%}{%- endfor -%}
{%- endif -%}
{%- endmacro -%}
{%- set lead = messages[0].role in ['system', 'developer'] -%}
{%- if lead or tools -%}
{{- '<|im_start|>system\\n' }}{{ text(messages[0].content) if lead else '' }}
{%- if tools -%}
{{- '\\n\\n' if lead else '' }}
{{- 'You may call these functions, given as JSON inside <tools></tools>:\\n<tools>' }}
{%- for tool in tools -%}{{- '\\n' ~ (tool | tojson) }}{%- endfor -%}
{{- '\\n</tools>\\nTo call one, answer with its name and arguments as JSON:\\n<tool_call>\\n' }}
{{- '{"name": "function", "arguments": {"argument": "value"}}\\n</tool_call>' }}
{%- endif -%}
{{- '<|im_end|>\\n' }}
{%- endif -%}
{%- for message in messages -%}
{%- if loop.first and lead -%}
{%- elif message.role == 'tool' -%}
{{- '<|im_start|>user\\n<tool_response>\\n' ~ text(message.content) ~ '\\n</tool_response>' }}
{{- '<|im_end|>\\n' }}
{%- elif message.role == 'assistant' and message.tool_calls -%}
{{- '<|im_start|>assistant\\n' ~ text(message.content) }}
{%- for call in message.tool_calls -%}
{%- set function = call.function if call.function is defined else call -%}
{%- set arguments = function.arguments -%}
{{- '\\n' if not loop.first or message.content else '' }}
{{- '<tool_call>\\n{"name": ' ~ (function.name | tojson) ~ ', "arguments": ' }}
{{- (arguments if arguments is string else (arguments | tojson)) ~ '}\\n</tool_call>' }}
{%- endfor -%}
{{- '<|im_end|>\\n' }}
{%- else -%}
{{- '<|im_start|>' ~ message.role ~ '\\n' ~ text(message.content) ~ '<|im_end|>\\n' }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' }}{%- endif -%}
"""


def make_model(directory: str | Path, config_json: str | Path | None = None) -> Path:
    """Make the model in `directory`, or leave it if what is there is already right.

    Args:
        directory: where config.json, model.safetensors, tokenizer.json … go; made whole elsewhere
            and renamed, so that a reader never sees half a model.
        config_json: a Llama architecture other than `CONFIG`.

    Returns:
        The directory, absolute.

    Raises:
        HostError: the directory holds something else, or cannot be written.
    """
    target = Path(directory).absolute()
    config = CONFIG if config_json is None else json.loads(Path(config_json).read_text("utf-8"))
    recipe = _recipe(config)
    if is_made(target, recipe):
        return target
    if target.exists() and any(target.iterdir()) and not (target / STAMP_FILE).exists():
        raise HostError(
            f"an empty folder for the demo model, or one that it made earlier: {target}",
            found=f"other files, without {STAMP_FILE}",
            do="name another folder, or empty this one",
        )
    try:
        _make_and_rename(target, config, recipe)
    except OSError as error:
        raise HostError(
            f"to write the demo model (8 MB) to {target}",
            found=error.strerror or str(error),
            do="free some space, or name a folder that you may write to",
        ) from error
    return target


def is_made(directory: Path, recipe: str) -> bool:
    """Whether the folder holds the model of this recipe, every byte of it."""
    try:
        stamp = json.loads((directory / STAMP_FILE).read_text("utf-8"))
        return bool(stamp["recipe"] == recipe) and all(
            _sha256((directory / name).read_bytes()) == digest
            for name, digest in stamp["sha256"].items()
        )
    except (OSError, ValueError, KeyError):
        return False


def _recipe(config: dict[str, Any]) -> str:
    """Hash of all that decides the bytes of the model."""
    parts = [MAKER_VERSION, SEED, config, GENERATION_CONFIG, CHAT_TEMPLATE, CORPUS]
    return _sha256(json.dumps(parts, sort_keys=True).encode())


def _make_and_rename(target: Path, config: dict[str, Any], recipe: str) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    fresh = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        fresh.chmod(0o755)
        _write_model(fresh, config)
        names = sorted(path.name for path in fresh.iterdir())
        stamp = {
            "recipe": recipe,
            "sha256": {name: _sha256((fresh / name).read_bytes()) for name in names},
        }
        _write_json(fresh / STAMP_FILE, stamp)
        if target.exists():
            shutil.rmtree(target)
        fresh.rename(target)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def _write_model(directory: Path, config: dict[str, Any]) -> None:
    tokenizer = train_tokenizer(config["vocab_size"])
    tokenizer.save(str(directory / "tokenizer.json"))
    _write_json(directory / "config.json", config)
    _write_json(directory / "generation_config.json", GENERATION_CONFIG)
    _write_json(
        directory / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": config["max_position_embeddings"],
            "clean_up_tokenization_spaces": False,
            "add_bos_token": False,
            "bos_token": "<|im_start|>",
            "eos_token": "<|im_end|>",
            "pad_token": "<|endoftext|>",
        },
    )
    (directory / "chat_template.jinja").write_text(CHAT_TEMPLATE, "utf-8")
    bias = token_bias(tokenizer, config)
    write_safetensors(directory / "model.safetensors", make_weights(config, bias))


def train_tokenizer(vocab_size: int) -> Tokenizer:
    """A byte-level BPE tokenizer, trained on the corpus to at most `vocab_size` tokens."""
    # The Rust library trains with a thread per core, which a 7 kB text is not worth, and warns
    # about them if the process forks later.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=1,
        special_tokens=[*SPECIAL_TOKENS, *MARKUP_TOKENS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS.splitlines(), trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL_TOKENS])
    tokenizer.add_tokens([AddedToken(token, special=False) for token in MARKUP_TOKENS])
    return tokenizer


def token_bias(tokenizer: Tokenizer, config: dict[str, Any]) -> dict[int, float]:
    """Weights from the constant dimension to tokens that are not to be chosen freely, by id."""
    bias = {}
    for token_id in range(config["vocab_size"]):
        token = tokenizer.id_to_token(token_id)
        text = "" if token is None else tokenizer.decode([token_id], skip_special_tokens=False)
        readable = text.isascii() and all(char.isprintable() or char == "\n" for char in text)
        if token_id == config["eos_token_id"]:
            bias[token_id] = END
        elif not text or token in (*SPECIAL_TOKENS, *MARKUP_TOKENS) or not readable:
            bias[token_id] = BAN
        elif not text.strip():
            bias[token_id] = BLANK
    return bias


def make_weights(
    config: dict[str, Any], bias: dict[int, float]
) -> dict[str, NDArray[numpy.float32]]:
    """Random weights under the names that Hugging Face gives a Llama, as float32."""
    import numpy

    random = numpy.random.Generator(numpy.random.PCG64(SEED))

    def normal(rows: int, columns: int, std: float) -> NDArray[numpy.float32]:
        return random.standard_normal((rows, columns), dtype=numpy.float32) * numpy.float32(std)

    hidden, vocab, inner = (
        config[key] for key in ("hidden_size", "vocab_size", "intermediate_size")
    )
    query = config["num_attention_heads"] * config["head_dim"]
    key_value = config["num_key_value_heads"] * config["head_dim"]
    ones = numpy.ones(hidden, dtype=numpy.float32)

    weights = {"model.embed_tokens.weight": normal(vocab, hidden, EMBEDDING_STD)}
    for index in range(config["num_hidden_layers"]):
        layer = f"model.layers.{index}."
        shapes = {
            "self_attn.q_proj": (query, hidden),
            "self_attn.k_proj": (key_value, hidden),
            "self_attn.v_proj": (key_value, hidden),
            "self_attn.o_proj": (hidden, query),
            "mlp.gate_proj": (inner, hidden),
            "mlp.up_proj": (inner, hidden),
            "mlp.down_proj": (hidden, inner),
        }
        for name, (rows, columns) in shapes.items():
            weights[f"{layer}{name}.weight"] = normal(rows, columns, MATRIX_STD)
        for name in ("self_attn.o_proj", "mlp.down_proj"):
            weights[f"{layer}{name}.weight"][0] = 0.0  # nothing is ever added to dimension 0
        weights[f"{layer}input_layernorm.weight"] = ones
        weights[f"{layer}post_attention_layernorm.weight"] = ones
    weights["model.norm.weight"] = ones
    weights["lm_head.weight"] = normal(vocab, hidden, OUTPUT_STD)

    weights["model.embed_tokens.weight"][:, 0] = CONSTANT
    weights["lm_head.weight"][:, 0] = 0.0
    for token_id, weight in bias.items():
        weights["lm_head.weight"][token_id] = 0.0
        weights["lm_head.weight"][token_id, 0] = weight
    return weights


def write_safetensors(path: Path, weights: dict[str, NDArray[numpy.float32]]) -> None:
    """Write the weights as bfloat16.

    NumPy has no bfloat16, and importing torch for it would take longer than all the rest.
    """
    import numpy
    from safetensors import TensorSpec, serialize_file

    buffers = {name: numpy.ascontiguousarray(_bfloat16(w)) for name, w in weights.items()}
    specs = {
        name: TensorSpec(
            dtype="bfloat16",
            shape=list(buffer.shape),
            data_ptr=buffer.ctypes.data,
            data_len=buffer.nbytes,
        )
        for name, buffer in buffers.items()
    }
    serialize_file(specs, path, metadata={"format": "pt"})
    path.chmod(0o644)  # the library writes 0600; a service user must be able to read it


def _bfloat16(values: NDArray[numpy.float32]) -> NDArray[numpy.uint16]:
    """The upper halves of the float32 bits, rounded to nearest even; little-endian."""
    import numpy

    bits = values.view(numpy.uint32)
    rounded = bits + numpy.uint32(0x7FFF) + ((bits >> numpy.uint32(16)) & numpy.uint32(1))
    return (rounded >> numpy.uint32(16)).astype("<u2")


def _write_json(path: Path, data: dict[str, Any]) -> None:
    path.write_text(json.dumps(data, indent=2, sort_keys=True) + "\n", "utf-8")


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        raise SystemExit("usage: python -m rayserve.demo.model DIRECTORY")
    print(make_model(sys.argv[1]))
