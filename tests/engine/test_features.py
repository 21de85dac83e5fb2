"""Do the parts of a spec that change what a model is reach a real engine: template, adapter, task?"""

from __future__ import annotations

import json
import tempfile
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from rayserve.demo.model import make_model
from tests.served import Served, make_plan

RANK = 8


def ask(served: Served, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """One answer, whole."""
    request = urllib.request.Request(
        served.url + path,
        json.dumps(body).encode(),
        {"Content-Type": "application/json", **served.headers},
    )
    with urllib.request.urlopen(request, timeout=60) as reply:
        answer: dict[str, Any] = json.load(reply)
    return answer


def make_adapter(folder: Path, model: Path) -> None:
    """A LoRA adapter of the demo's model, strong enough to change what it says."""
    config = json.loads((model / "config.json").read_text())
    hidden = config["hidden_size"]
    random = np.random.default_rng(7)
    tensors = {}
    for layer in range(config["num_hidden_layers"]):
        name = f"base_model.model.model.layers.{layer}.self_attn.o_proj"
        tensors[f"{name}.lora_A.weight"] = random.normal(size=(RANK, hidden)).astype(np.float32)
        tensors[f"{name}.lora_B.weight"] = random.normal(size=(hidden, RANK)).astype(np.float32)
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    adapter = {"peft_type": "LORA", "r": RANK, "lora_alpha": 64, "target_modules": ["o_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(adapter))


def test_a_chat_template_and_a_lora_adapter_from_disk():
    """The template of the spec makes the prompt, and the adapter answers under its own name."""
    with tempfile.TemporaryDirectory(prefix="rse-", dir="/tmp") as name:
        folder = Path(name)
        make_model(folder / "model")
        make_adapter(folder / "tuned", folder / "model")
        template = folder / "template.jinja"
        template.write_text("{% for m in messages %}{{ m.content }}{% endfor %} yes yes yes")
        plan = make_plan(
            folder,
            chat={"template_file": str(template)},
            lora={"adapters": [{"name": "tuned", "path": str(folder / "tuned")}]},
            sampling={"temperature": 0.0},
        )
        with Served(plan, folder) as served:
            messages = [{"role": "user", "content": "a"}]
            chat = {"messages": messages, "max_tokens": 16, "return_token_ids": True}
            plain = ask(served, "/v1/chat/completions", {"model": served.model, **chat})
            tuned = ask(served, "/v1/chat/completions", {"model": "tuned", **chat})
            tokens = ask(served, "/tokenize", {"model": served.model, "prompt": "a yes yes yes"})
            assert plain["prompt_token_ids"] == tokens["tokens"]
            text = plain["choices"][0]["message"]["content"]
            assert tuned["choices"][0]["message"]["content"] != text
            models = urllib.request.Request(served.url + "/v1/models", headers=served.headers)
            with urllib.request.urlopen(models, timeout=30) as reply:
                names = {model["id"] for model in json.load(reply)["data"]}
            assert names == {served.model, "tuned"}


def test_a_model_that_embeds_serves_embeddings():
    """Where the task is pooling, the same app answers /v1/embeddings, and has no chat."""
    with tempfile.TemporaryDirectory(prefix="rse-", dir="/tmp") as name:
        plan = make_plan(Path(name), engine_args={"runner": "pooling", "convert": "embed"})
        with Served(plan, Path(name), probe="/v1/embeddings") as served:
            body = {"model": served.model, "input": ["one text", "another"]}
            answer = ask(served, "/v1/embeddings", body)
            first, second = (row["embedding"] for row in answer["data"])
            assert len(first) == 256
            assert first != second
