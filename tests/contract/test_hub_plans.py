"""Does `rayserve plan` fetch an id, pin its commit, and plan it again without the hub?"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading

import yaml

from tests.bad_specs import ROOT
from tests.contract.hub_client import (
    CONFIG,
    ID,
    ODD,
    TOKEN,
    cached_files,
    environment,
    plan,
    shards,
    spec,
)
from tests.contract.hub_server import COMMIT, LATER


def test_plan_pins_the_commit_and_plans_it_again_without_the_hub(hub, tmp_path):
    """The plan serves the commit that was read; made again offline it is the same, moved branch or not."""
    hub.repos[ID][COMMIT] |= {"config.json": ODD} | shards(2)
    folder, home = spec(tmp_path / "env"), tmp_path / "home"
    done = plan(folder, environment(hub, home, HF_TOKEN=TOKEN))
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines() == [
        f"{ID}: asking 127.0.0.1 for config.json at main",
        f"{ID}: reading the headers of 2 files of weights",
    ]
    text = (folder / "plan.yml").read_text()
    made = yaml.safe_load(text)["rayserve_plan"]
    assert {"name": "revision", "value": COMMIT} in made["replica"]["engine_args"]
    assert made["replica"]["model_source"] == "hub"
    assert made["checkpoint"] == [{"name": "BF16", "value": 16}, {"name": "F32", "value": 8}]
    assert made["choices"][0]["value"] == COMMIT
    assert TOKEN not in text + done.stdout + done.stderr
    hub.refs["main"] = LATER
    again = plan(folder, environment(hub, home, HF_HUB_OFFLINE="1"), "--check")
    assert again.returncode == 0, again.stderr


def test_an_interrupted_download_is_not_planned_as_the_whole(hub, tmp_path):
    """Some files of the weights in the cache, without the index: the hub is asked for all of them."""
    files = {"config.json": ODD} | shards(3)
    hub.repos[ID][COMMIT] |= files
    folder, home = spec(tmp_path / "env", f", revision: {COMMIT}"), tmp_path / "home"
    snapshot = home / "hub" / "models--acme--tiny" / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    for name in ("config.json", "model-00000-of-00003.safetensors"):
        (snapshot / name).write_bytes(files[name])
    offline = plan(folder, environment(hub, home, HF_HUB_OFFLINE="1"), "--json")
    assert offline.returncode == 2, offline.stdout
    assert "checkpoint_bytes" in json.loads(offline.stdout)["needed"]
    done = plan(folder, environment(hub, home), "--json")
    assert done.returncode == 0, done.stderr
    made = json.loads(done.stdout)["plan"]
    assert made["checkpoint"] == [{"name": "BF16", "value": 24}, {"name": "F32", "value": 12}]


def test_plan_reads_the_quantization_beside_config_json(hub, tmp_path):
    """hf_quant_config.json of ModelOpt counts as vLLM counts it, and is part of the revision."""
    quant = {
        "producer": {"name": "modelopt", "version": "0.29.0"},
        "quantization": {"quant_algo": "FP8", "exclude_modules": ["lm_head"]},
    }
    hub.repos[ID][COMMIT]["hf_quant_config.json"] = json.dumps(quant).encode()
    folder, home = spec(tmp_path / "env", f", revision: {COMMIT}"), tmp_path / "home"
    done = plan(folder, environment(hub, home), "--json", "--html", str(tmp_path / "plan.html"))
    assert done.returncode == 0, done.stderr
    made = json.loads(done.stdout)["plan"]
    names = [item["name"] for item in made["replica"]["content"]]
    assert names == [f"{ID}/config.json", f"{ID}/hf_quant_config.json"]
    del hub.repos[ID][COMMIT]["hf_quant_config.json"]
    plain = plan(folder, environment(hub, tmp_path / "other"), "--json", "--dry-run")
    assert plain.returncode == 0, plain.stderr
    memory = json.loads(plain.stdout)["plan"]["memory"]
    assert memory["model"] == made["memory"]["model"] == "exact"
    assert made["memory"]["weights_bytes"] < memory["weights_bytes"]


def test_candidates_may_be_ids_and_one_that_fails_has_its_row(hub, tmp_path):
    """`--candidates` fetches each config.json, and an id that is not there stops no other."""
    folder = spec(tmp_path / "env")
    text = (
        (folder / "cluster.yml")
        .read_text()
        .replace(
            "{hf_id: acme/tiny, served_name: chat}",
            "{served_name: chat, candidates: [{name: one, hf_id: acme/tiny}, {name: two, hf_id: acme/none}]}",
        )
    )
    (folder / "cluster.yml").write_text(text)
    done = plan(folder, environment(hub, tmp_path / "home"), "--candidates", "--json")
    assert done.returncode == 0, done.stderr
    rows = {row["name"]: row for row in json.loads(done.stdout)["rows"]}
    assert rows["one"]["rank"] == 1
    assert "acme/none" in json.dumps(rows["two"])
    picked = plan(folder, environment(hub, tmp_path / "home"))
    assert picked.returncode == 0, picked.stderr
    made = yaml.safe_load((folder / "plan.yml").read_text())["rayserve_plan"]
    assert [item["value"] for item in made["choices"][:2]] == ["one", COMMIT]


DRAFT = "acme/draft"
GUESS = "  speculative: {method: draft_model, model: acme/draft, num_tokens: 2%s}\n"


def test_the_draft_model_of_an_id_is_fetched_and_pinned_as_the_model_is(hub, tmp_path):
    """Its memory is counted from the config.json of the commit that every host will load."""
    hub.repos[DRAFT] = {COMMIT: {"config.json": CONFIG}}
    folder, home = spec(tmp_path / "env"), tmp_path / "home"
    with (folder / "cluster.yml").open("a") as file:
        file.write(GUESS % "")
    done = plan(folder, environment(hub, home))
    assert done.returncode == 0, done.stderr
    assert f"{DRAFT}: asking 127.0.0.1 for config.json at main" in done.stderr
    made = yaml.safe_load((folder / "plan.yml").read_text())["rayserve_plan"]
    arguments = {item["name"]: item["value"] for item in made["replica"]["engine_args"]}
    assert arguments["speculative_config"]["revision"] == COMMIT
    assert made["memory"]["draft_bytes"] > 0
    assert made["memory"].get("uncounted", []) == []
    assert [item["name"] for item in made["choices"][:2]] == [
        "model.revision",
        "speculative.revision",
    ]
    hub.refs["main"] = LATER
    again = plan(folder, environment(hub, home, HF_HUB_OFFLINE="1"), "--check")
    assert again.returncode == 0, again.stderr


def test_a_draft_model_that_is_not_there_is_told_at_its_key(hub, tmp_path):
    """An id that the hub does not have names `speculative.model`, and no plan is written."""
    folder = spec(tmp_path / "env")
    with (folder / "cluster.yml").open("a") as file:
        file.write(GUESS % "")
    done = plan(folder, environment(hub, tmp_path / "home"), "--json")
    assert done.returncode == 2, done.stderr
    told = json.loads(done.stdout)
    assert told["key"].endswith("speculative.model")
    assert DRAFT in told["needed"]
    assert [path.name for path in folder.iterdir()] == ["cluster.yml"]


def test_the_page_of_a_plan_asks_the_hub_for_nothing_more(hub, tmp_path):
    """With candidates on the hub, a plan with its page reads each header once, as one without."""
    hub.repos[ID][COMMIT] |= {"config.json": ODD} | shards(3)
    folder = spec(tmp_path / "env")
    path = folder / "cluster.yml"
    path.write_text(
        path.read_text().replace(
            "{hf_id: acme/tiny, served_name: chat}",
            "{served_name: chat, candidates: [{name: one, hf_id: acme/tiny}]}",
        )
    )
    html = tmp_path / "plan.html"
    done = plan(folder, environment(hub, tmp_path / "home"), "--html", str(html))
    assert done.returncode == 0, done.stderr
    assert "Candidates" in html.read_text()
    away = [one.path for one in hub.asked(".safetensors") if one.path.startswith("/cdn")]
    assert len(away) == len(set(away)) == 3


def test_a_gated_id_ends_with_exit_code_4_and_writes_nothing(hub, tmp_path):
    """The command says in JSON what is missing, and leaves no plan."""
    hub.misbehave = lambda handler, _file: handler.send(403, X_Error_Code="GatedRepo") or True
    folder = spec(tmp_path / "env")
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "token").write_text(TOKEN)
    done = plan(folder, environment(hub, tmp_path / "home"), "--json")
    assert done.returncode == 4, done.stderr
    told = json.loads(done.stdout)
    assert told["error"] == "HostError"
    assert told["key"].endswith("model.hf_id")
    assert TOKEN not in done.stdout + done.stderr
    assert "a token that may not read it" in told["found"]
    sent = [one.headers.get("authorization") for one in hub.asked("config.json", "HEAD")]
    assert sent == [f"Bearer {TOKEN}"]
    assert len(hub.log) == 1  # and nothing else is asked, or told to the hub
    assert "torch" not in hub.log[0].headers["user-agent"]
    assert [path.name for path in folder.iterdir()] == ["cluster.yml"]


def test_ctrl_c_while_fetching_ends_at_once_and_leaves_nothing(hub, tmp_path):
    """An interrupted fetch leaves no part of a file, no plan and no traceback."""
    begun, go_on = threading.Event(), threading.Event()

    def stall(handler, _file):
        handler.send(200, X_Repo_Commit=COMMIT, ETag='"a"', Content_Length="700")
        if handler.command == "GET":
            handler.wfile.write(b"{")
            begun.set()
            go_on.wait(30)
            handler.close_connection = True
        return True

    hub.misbehave = stall
    folder, home = spec(tmp_path / "env"), tmp_path / "home"
    with subprocess.Popen(
        [sys.executable, "-m", "rayserve.cli", "plan", str(folder)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT,
        env=environment(hub, home),
    ) as child:  # fmt: skip
        try:
            assert begun.wait(60)
            child.send_signal(signal.SIGINT)
            out, err = child.communicate(timeout=30)
        finally:
            go_on.set()
            child.kill()
    assert child.returncode == 1
    assert "Traceback" not in out + err
    assert [path.name for path in folder.iterdir()] == ["cluster.yml"]
    left = [name for name in cached_files(home / "hub") if "incomplete" in name or name == "a"]
    assert left == []


def test_without_huggingface_hub_a_plan_says_what_to_install(tmp_path):
    """Only an id without `config` needs the package, and its absence is told."""
    folder = spec(tmp_path / "env")
    code = (
        "import sys; sys.modules['huggingface_hub'] = None\n"
        "from rayserve.cli import main\n"
        f"main(['plan', {str(folder)!r}, '--json'])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "--json"],
        capture_output=True, text=True, cwd=ROOT, check=False,
    )  # fmt: skip
    assert done.returncode == 4
    assert "pip install" in json.loads(done.stdout)["do"]
