"""Does a pasted command line become a cluster.yml that the toolkit accepts, with what is wrong with it?"""

from __future__ import annotations

import contextlib
import json
import shlex
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayserve.engine import validate, validate_env
from rayserve.engine.commands import parse_command
from rayserve.engine.flags import Presence, Version, histories, releases_read
from rayserve.errors import InputError, RayserveError, UsageError
from rayserve.owned import REMOVED_ARGS
from rayserve.planner.convert import convert, convert_command
from rayserve.spec import SPEC_KEY, parse_spec
from rayserve.spec.placeholders import PLACEHOLDER
from tests.bad_specs import ROOT
from tests.errors_of import error_of
from tests.unit.converted import CASES, HOSTILE, PASTED, at, kinds, run, spec_of
from tests.yaml_text import load_yaml


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_command_becomes_a_spec_that_is_accepted(case):
    """Each command line gives a cluster.yml that the strict parser and the argument checks take."""
    found = run(case)
    spec = parse_spec(found.cluster_yml, "cluster.yml", draft=True)
    refused = [error_of(validate, *argument) for argument in spec.engine_args.items()]
    refused += [error_of(validate_env, *variable) for variable in spec.env.items()]
    assert set(refused) <= {None}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_flags_stand_where_they_belong(case):
    """The keys of each case have the values that the flags gave."""
    spec = spec_of(run(case).cluster_yml)
    assert {key: at(spec, key) for key in case.get("spec", {})} == case.get("spec", {})
    assert [key for key in case.get("lacks", []) if at(spec, key) is not None] == []


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_findings_are_told(case):
    """What is wrong with each command line is found, and says what to do."""
    found = run(case)
    wanted = [item.replace('""', "").strip() for item in case.get("finds", [])]
    assert [item for item in wanted if item not in kinds(found)] == []
    assert all(item.what and (item.do or item.severity == "note") for item in found.findings)
    if "told_version" in case:
        assert found.version == case["told_version"]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_no_secret_is_repeated(case):
    """Neither form of the answer holds a secret of the command line."""
    found = run(case)
    answers = found.as_text() + json.dumps(found.as_dict())
    assert [secret for secret in case.get("hides", []) if secret in answers] == []


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_every_flag_has_a_fate(case):
    """Each flag of the command line is carried to a key, or left out in so many words."""
    found = run(case)
    names = {flag.name for flag in parse_command(case["command"]).flags if flag.name}
    assert names <= {fate.name for fate in found.flags} | {"model", "revision"}


@pytest.mark.parametrize("case", HOSTILE, ids=lambda case: case["name"])
def test_what_is_no_command_is_refused(case):
    """A text that does not start one vLLM server is refused, with what was needed."""
    with pytest.raises(InputError) as caught:
        convert(case["text"])
    assert case["expect"] in str(caught.value)
    assert caught.value.do


def test_a_megabyte_is_refused():
    """A text of a megabyte is refused before it is read."""
    with pytest.raises(InputError, match="64 KiB"):
        convert("vllm serve /srv/m " + "x" * 2**20)


def test_many_words_are_refused():
    """More words than a command line has are refused."""
    with pytest.raises(InputError, match="2000 words"):
        convert("vllm serve /srv/m" + " a" * 3000)


def test_nothing_of_the_text_is_run(tmp_path):
    """No text that is refused or converted makes a file, though a shell would."""
    made = tmp_path / "made"
    for text in (f"vllm serve /srv/m; touch {made}", f"vllm serve $(touch {made})",
                 f"vllm serve /srv/m > {made}", f"vllm serve /srv/m | tee {made}"):  # fmt: skip
        with pytest.raises(InputError) if ("touch" in text) else contextlib.nullcontext():
            convert(text)
    assert not made.exists()


# ── the command of eight GPUs ─────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("extra, written", [(', "revision": "abc"', "abc"), ("", PLACEHOLDER)])
def test_a_draft_model_of_an_id_keeps_its_commit_or_asks_for_it(extra, written):
    """Every host is to load the same draft model, as the same model."""
    guess = f'{{"method": "eagle", "model": "a/b", "num_speculative_tokens": 3{extra}}}'
    found = convert(f"vllm serve /srv/models/a --speculative-config '{guess}'")
    assert at(spec_of(found.cluster_yml), "speculative.revision") == written
    assert ("speculative.revision" in [one.key for one in found.placeholders]) is not bool(extra)


@pytest.mark.parametrize("revision", ["main", "349b2dd"])
def test_what_may_move_is_asked_for_as_a_commit(revision):
    """The plan would refuse a branch, tag or short hash beside a copy of config.json."""
    found = convert(f"vllm serve org/model --revision {revision}")
    assert at(spec_of(found.cluster_yml), "model.revision") == PLACEHOLDER
    why = next(one.why for one in found.placeholders if one.key == "model.revision")
    assert revision in why
    assert [one.key for one in found.flags if one.name == "revision"] == [""]


def test_a_folder_of_an_example_is_a_placeholder():
    """The plan would refuse it: convert names it among what is to be filled in, as it was written."""
    found = convert("vllm serve /path/to/model -tp 8")
    held = {item.key: item.value for item in found.placeholders}
    assert held["model.path"] == "/path/to/model"
    assert at(spec_of(found.cluster_yml), "model.path") == "/path/to/model"


# ── the forms of the answer ───────────────────────────────────────────────────────────────────


def test_text_is_itself_a_cluster_yml():
    """The findings stand as comments, so that the output can be redirected to cluster.yml."""
    text = convert_command(PASTED, gpu="A100-80GB-SXM")
    assert parse_spec(text, "cluster.yml", draft=True).seed == 42
    assert all(len(line) <= 120 for line in text.splitlines())


def test_placeholders_are_marked_where_they_stand():
    """What the command line cannot say is marked, and the option that gives it is named."""
    text = convert_command("vllm serve org/model")
    for key, option in (
        ("gpu:", "--gpu"),
        ("hosts:", "--hosts"),
        ("gpus_per_host:", "--gpus-per-host"),
    ):
        line = next(i for i, row in enumerate(text.splitlines()) if row.strip(" -").startswith(key))
        near = "\n".join(text.splitlines()[max(0, line - 4) : line + 1])
        assert "placeholder" in near
        assert option in near


def test_options_fill_the_placeholders():
    """With all options given, no host is a placeholder."""
    found = convert("vllm serve /srv/m -tp 8", gpu="H100-80GB-SXM", hosts=2, gpus_per_host=8)
    assert [item.key for item in found.placeholders] == ["model.config"]
    assert at(spec_of(found.cluster_yml), "node_pools.0") == {
        "name": "gpu", "hosts": 2, "gpu": "H100-80GB-SXM", "gpus_per_host": 8,
    }  # fmt: skip


def test_json_has_the_documented_form():
    """The JSON form has the keys that docs/convert.md names, and nothing that JSON cannot hold."""
    answer = json.loads(convert_command(PASTED, as_json=True, version="0.7.3", aim="latency"))
    page = (ROOT / "docs" / "convert.md").read_text(encoding="utf-8")
    keys = [*answer, *answer["findings"][0], *answer["placeholders"][0], *answer["flags"][0]]
    assert [key for key in keys if f"`{key}`" not in page] == []
    assert answer["format"] == 1
    assert answer["version"] == "0.7.3"
    assert sum(answer["counts"].values()) == len(answer["findings"])


def test_every_kind_of_finding_is_documented():
    """docs/convert.md names each kind of finding that the cases bring up."""
    page = (ROOT / "docs" / "convert.md").read_text(encoding="utf-8")
    met = {item.kind for case in CASES for item in run(case).findings}
    assert [kind for kind in sorted(met) if f"`{kind}`" not in page] == []


def test_same_text_gives_the_same_answer():
    """The answer depends on the text and the options alone."""
    assert convert_command(PASTED, as_json=True) == convert_command(PASTED, as_json=True)


@pytest.mark.parametrize(
    "options", [{"version": "latest"}, {"aim": "speed"}, {"gpu": "A100-80"}, {"version": "0.x"}]
)
def test_wrong_options_are_refused(options):
    """An option that is not one of its own values is refused, with what to write."""
    with pytest.raises(UsageError) as caught:
        convert("vllm serve /srv/m", **options)
    assert caught.value.do


# ── the history of flags ──────────────────────────────────────────────────────────────────────


def test_versions_are_ordered():
    """Releases are ordered as PEP 440 orders them."""
    texts = ["0.6.3.post1", "0.6.3.post2.dev308", "0.6.4", "0.7.3", "0.7.4.dev388+g1", "0.7.4rc1", "0.7.4",
             "0.10.1", "0.10.1.1", "v0.33.0"]  # fmt: skip
    versions = [Version.parse(text) for text in texts]
    assert sorted(versions) == versions
    assert Version.parse("main") is None


@pytest.mark.parametrize(
    "flag, version, presence",
    [
        ("swap_space", "0.17.1", Presence.PRESENT),
        ("swap_space", "0.18.0", Presence.GONE),
        ("swap_space", "0.18.0.dev3", Presence.UNKNOWN),
        ("num_scheduler_steps", "0.10.0", Presence.PRESENT),
        ("num_scheduler_steps", "0.10.1", Presence.GONE),
        ("rope_scaling", "0.11.0", Presence.PRESENT),
        ("rope_scaling", "0.11.1.dev5", Presence.UNKNOWN),
        ("num_lookahead_slots", "0.11.2", Presence.UNKNOWN),
        ("disable_frontend_multiprocessing", "0.11.0", Presence.PRESENT),
        ("disable_frontend_multiprocessing", "0.18.0", Presence.UNKNOWN),
        ("disable_frontend_multiprocessing", "0.19.1", Presence.GONE),
        ("speculative_model", "0.8.2", Presence.PRESENT),
        ("speculative_model", "0.8.3", Presence.GONE),
        ("async_scheduling", "0.9.2", Presence.NOT_YET),
        ("async_scheduling", "0.10.0", Presence.PRESENT),
        ("max_num_partial_prefills", "0.27.0", Presence.GONE),
        ("tensor_parallel_size", "0.33.0", Presence.UNKNOWN),
        ("enable_flash_attn", "0.7.3", Presence.NEVER),
    ],
)
def test_presence_claims_no_more_than_is_known(flag, version, presence):
    """Between the last release that has a flag and the first that lacks it, the answer is unknown."""
    assert histories()[flag].presence(version) == presence


def test_history_agrees_with_itself():
    """Every date is a release, in order; a flag that is gone is not in the pinned vLLM; each says what to do."""
    for name, history in histories().items():
        dates = [
            Version.parse(d)
            for d in (history.lacks, history.first, history.last, history.gone)
            if d
        ]
        assert None not in dates, name
        assert dates == sorted(dates), name
        gone_today = history.presence(releases_read()[-1]) != Presence.PRESENT
        assert not gone_today or history.do, name


def test_history_knows_every_removed_argument():
    """What `engine_args` refuses as removed has its history."""
    assert [name for name in REMOVED_ARGS if name not in histories()] == []


def test_page_is_not_a_stub():
    """The page for users shows the command and both forms."""
    page = Path(ROOT / "docs" / "convert.md").read_text(encoding="utf-8")
    assert "rayserve convert" in page
    assert "--json" in page


# ── hostile details ───────────────────────────────────────────────────────────────────────────

WORDS = st.sampled_from(
    ["--seed", "--tensor-parallel-size", "-tp", "--compilation-config.a.b", "--compilation-config",
     "--override-generation-config", "--speculative-config", "--rope-scaling", "--lora-modules",
     "--limit-mm-per-prompt", "--hf-overrides", "--max-model-len", "--enforce-eager", "--api-key", "-O",
     "--served-model-name", "--chat-template", "--port", "--nnodes", "--data-parallel-size", "--x.y+",
     "--disable-custom-all-reduce", "--kv-cache-dtype", "--no-enforce-eager", "--max-num", "--device", "=",
     "8", "-1", "1e999", "NaN", "{}", "[]", '{"a": NaN}', '{"temperature": "hot"}', '{"a": "{{ x }}"}',
     '{"rope_type": "yarn", "factor": 2}', '{"method": "ngram"}', "a=/b", "cpu", "\u00b2", "99999999999999999",
     '{"a": 123456789012345678901234567890}', "[[[[[[[[[[[[[[[[[[[[1]]]]]]]]]]]]]]]]]]]]", "\u2028x: y", "#"]
)  # fmt: skip


def assert_accepted_or_refused(text, **options):
    """Convert a text; the answer is a file that is accepted, or one of our errors with what to do."""
    try:
        answer = convert(text, **options).as_text()
    except RayserveError as error:
        answer = error
    if isinstance(answer, str):
        assert parse_spec(answer, "cluster.yml", draft=True).model.served_name
    else:
        assert answer.do


@given(st.lists(WORDS, max_size=12))
def test_any_flags_give_an_accepted_file_or_a_clear_error(words):
    """Whatever flags and values meet, the answer is a file that is accepted, or one of our errors."""
    assert_accepted_or_refused(
        " ".join(["vllm serve /srv/m", *map(shlex.quote, words)]), aim="latency"
    )


@given(st.text(max_size=200))
def test_any_text_is_answered(text):
    """Whatever stands before, in and behind a command line, no other error than ours is raised."""
    for pasted_text in (text, f"vllm serve /srv/m {text}", f"vllm serve /srv/m --seed 1\n{text}"):
        assert_accepted_or_refused(pasted_text)


@pytest.mark.parametrize(
    "text",
    ["vllm serve /srv/m\n" + " " * 60_000 + "x", "vllm serve /srv/m --a " + "\\ " * 30_000,
     "vllm serve /srv/m --otlp-traces-endpoint ://" + "a:" * 30_000, "vllm serve /srv/m " + "--q" * 20_000,
     "vllm serve /srv/m " + " ".join(f"--flag-{n}" for n in range(250)), "\n" * 60_000,
     "vllm serve /srv/m " + "$" * 60_000, "(" * 60_000, "vllm serve " + "<a" * 30_000,
     "vllm serve /srv/m --hf-overrides '" + "[" * 50_000 + "'"],
    ids=lambda text: text[:30].strip(),
)  # fmt: skip
def test_long_text_is_answered_soon(text):
    """No text within the limit of size takes more than two seconds of processor."""
    start = time.process_time()
    with contextlib.suppress(RayserveError):
        convert(text)
    assert time.process_time() - start < 2


def test_no_line_break_leaves_a_comment():
    """A value with a line break of any kind cannot add a key to the file."""
    text = convert_command(
        "vllm serve /srv/m --port 'x\nrayserve_cluster2: {}' --nope 'a\u2028b: c'"
    )
    assert list(load_yaml(text)) == [SPEC_KEY]


def test_lists_of_flags_name_only_flags_that_are_known():
    """Each flag that a list of a release names is one of the pinned vLLM's, and stands in one list."""
    rows = load_yaml((ROOT / "rayserve" / "data" / "vllm-flags.yml").read_text(encoding="utf-8"))
    names = [name for listed in rows["since"].values() for name in listed]
    assert len(names) == len(set(names))
    known = histories()
    assert [name for name in names if known[name].presence("0.32.0") != Presence.PRESENT] == []
    assert [name for name in {*rows["gone"], *rows["never"]} if name in names] == []


@pytest.mark.parametrize(
    "version,piece,listed",
    [
        ("0.6", "vLLM 0.6 takes it", True),
        ("0.6.0", "vLLM 0.6.0 takes it", True),
        ("v0.10", "vLLM 0.10 takes it", True),
        ("0.34", "vLLM 0.32.0, the last whose list was read, refuses it", False),
        ("0.5", "whether vLLM 0.5 takes it is not known", False),
    ],
)
def test_a_release_is_known_however_it_is_written_and_only_if_it_was_read(version, piece, listed):
    """0.6 is 0.6.0; of releases beyond those that were read nothing is claimed."""
    found = convert("vllm serve /m --disable-log-requests", version=version).findings
    assert piece in next(item.what for item in found if item.kind == "removed")
    told = ("no whole list", "the last release whose flags were read")
    assert any(words in item.what for item in found for words in told) is not listed


@pytest.mark.parametrize("version, warned", [("1.2", True), ("0.5", False), ("0.32.0", False)])
def test_a_release_after_the_last_that_was_read_is_a_warning(version, warned):
    """A slip such as 1.2 is told before the notes, with the release up to which flags are known."""
    finding = convert("vllm serve /m", version=version).findings[0]
    told = f"vLLM {version} is later than {releases_read()[-1]}" in finding.what
    assert (finding.severity == "warning" and told) is warned


@pytest.mark.parametrize(
    "text, what",
    [
        ("vllm serve /m > /tmp/log 2>&1", "line 1: where the output goes is left out"),
        ("vllm serve /m &", "line 1: the `&` is left out"),
        ("pip install vllm\nvllm serve /m", "line 1: `pip`, which starts no server, is left out"),
        (
            "services: {v: {image: 'vllm/vllm-openai:v0.9.0', command: [--model, /m]}}",
            "what the manifest says of the container is left out",
        ),
    ],
)
def test_what_is_left_out_is_one_sentence(text, what):
    """It is named once, with what becomes of it and without a reason that repeats it."""
    finding = next(item for item in convert(text).findings if "left out" in item.what)
    assert finding.what == what
    assert finding.do
    assert not finding.why


@pytest.mark.parametrize(
    "own,kind,kept",
    [({"quant_method": "compressed-tensors"}, "contradiction", None), (None, "deprecated", "fp8")],
)
def test_fp8_beside_a_config_json(own, kind, kept):
    """On a checkpoint of another method vLLM stops; on one of 16 bits it calls the word deprecated."""
    config = {"num_hidden_layers": 2, "quantization_config": own}
    found = convert("vllm serve /m --quantization fp8", config=config)
    assert [item.severity for item in found.findings if item.kind == kind]
    assert at(spec_of(found.cluster_yml), "precision.quantization") == kept
