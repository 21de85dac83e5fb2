"""What a child finds in Ray's stead: real folders, key files and tokens; what systemd and GRUB say."""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from rayserve.cli import main
from rayserve.health import gate
from rayserve.health.checks.wanted import Wanted
from rayserve.health.facts import as_user
from rayserve.health.facts.as_user import BECOME, FOLDER, ask, python
from rayserve.health.facts.plan_files import read_folder, read_keys, read_token
from rayserve.health.facts.ray_unit import Asker, RayUnit, read_ray_unit, this_process
from rayserve.health.facts.run import run
from rayserve.health.readings.grub import next_release, parse_environment, parse_menu
from rayserve.health.results import Check, Status, render
from rayserve.health.wants import wanted_of
from rayserve.inventory import read_plan

KEY = "sk-0123456789abcdef0123456789abcdef"
OURSELVES = RayUnit(inside=False, known=True, user="", asker=this_process().user, environment={})
NOBODY = 65534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes another user")


def wanted(**more: object) -> Wanted:
    """A plan that wants secrets and folders alone."""
    return Wanted(gpus=0, model="", label="", memory_mib=0, **more)  # type: ignore[arg-type]


def secret(folder: Path, text: str, mode: int = 0o600) -> str:
    """A file with a secret."""
    path = folder / "secret"
    path.write_text(text)
    path.chmod(mode)
    return str(path)


def test_a_folder_is_seen_with_its_file_system(tmp_path: Path) -> None:
    """A folder that is there has a size, may be read and written, and is empty until it is not."""
    found = read_folder(str(tmp_path), OURSELVES, Path("/"), run)
    assert (found.error, found.missing, found.readable, found.writable) == ("", False, True, True)
    assert found.size_bytes >= found.free_bytes > 0
    assert found.empty
    (tmp_path / "config.json").touch()
    assert not read_folder(str(tmp_path), OURSELVES, Path("/"), run).empty


@pytest.mark.parametrize("what", ["nothing", "a file", "a broken link", "a loop"])
def test_what_is_no_folder_is_an_error(tmp_path: Path, what: str) -> None:
    """Nothing, a file or a link that leads nowhere is told, and never raises."""
    path = tmp_path / "it"
    if what == "a file":
        path.touch()
    elif what != "nothing":
        path.symlink_to("it" if what == "a loop" else "nowhere")
    found = read_folder(str(path), OURSELVES, Path("/"), run)
    assert found.error
    assert found.missing == (what in ("nothing", "a broken link"))


def test_a_question_that_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Where the kernel does not come back from a path, the folder is silent when the limit is over."""
    monkeypatch.setattr(as_user, "PATH_S", 0.5)
    hanging = "import os, time\nos.path.realpath = lambda *_, **__: time.sleep(60)\n"
    monkeypatch.setattr("rayserve.health.facts.plan_files.FOLDER", hanging + FOLDER)
    began = time.monotonic()
    found = read_folder(str(tmp_path), OURSELVES, Path("/"), run)
    assert (found.silent, found.error) == (True, "no answer within 0.5 s")
    assert time.monotonic() - began < 10


def test_keys_are_counted_and_never_said(tmp_path: Path) -> None:
    """A file that a replica takes gives a number; what stands in it is in no fact."""
    path = secret(tmp_path, f"# ours\n{KEY}\n{KEY[::-1]}\n")
    found = read_keys(wanted(key_file=path), OURSELVES, run)
    assert found is not None
    assert (found.count, found.needed) == (2, "")
    assert KEY not in repr(found)


@pytest.mark.parametrize(
    "text, mode, says",
    [
        (f"{KEY}\n", 0o644, "mode 0644"),
        ("", 0o600, "none"),
        (f"{KEY}\nshort\n", 0o600, "5 characters, line 2"),
        (f"{KEY[:10]} {KEY[10:]}\n", 0o600, "not visible ASCII, line 1"),
    ],
)
def test_the_replicas_own_refusal_is_told(tmp_path: Path, text: str, mode: int, says: str) -> None:
    """What the replica would say of a file, with the line, and without a word of the line."""
    found = read_keys(wanted(key_file=secret(tmp_path, text, mode)), OURSELVES, run)
    assert found is not None
    assert says in found.found
    assert found.do
    assert KEY[:10] not in repr(found)


@pytest.mark.parametrize("what", ["a pipe", "a folder", "nothing"])
def test_secrets_that_are_no_files_are_told(tmp_path: Path, what: str) -> None:
    """A pipe holds nobody up; it, a folder and nothing are no key file and no token."""
    path = tmp_path / "it"
    if what == "a pipe":
        os.mkfifo(path, 0o600)
    elif what == "a folder":
        path.mkdir(0o700)
    keys = read_keys(wanted(key_file=str(path)), OURSELVES, run)
    assert keys is not None
    assert keys.needed
    unit = RayUnit(
        inside=False,
        known=True,
        user="",
        asker="root",
        environment={"RAY_AUTH_TOKEN_PATH": str(path)},
    )
    token = read_token(wanted(token=True), unit, Path("/"), run)
    assert token is not None
    assert token.error


@pytest.mark.parametrize("text", ["a\nb", "ключ", "a" * 5000])
def test_a_token_that_ray_would_not_take_is_an_error(tmp_path: Path, text: str) -> None:
    """The check judges as `rayserve deploy` does: one line of visible ASCII, of a token's length."""
    unit = RayUnit(
        inside=False,
        known=True,
        user="",
        asker="root",
        environment={"RAY_AUTH_TOKEN_PATH": secret(tmp_path, text)},
    )
    token = read_token(wanted(token=True), unit, Path("/"), run)
    assert token is not None
    assert "ASCII" in token.error


def test_a_name_that_can_be_no_path_is_told() -> None:
    """A NUL character in a plan's path is an error of that path, not of the check."""
    found = read_folder("/a\0b", OURSELVES, Path("/"), run)
    assert "NUL" in found.error
    assert found.missing


def test_without_a_unit_the_token_is_looked_for_by_home(tmp_path: Path) -> None:
    """As Ray looks: HOME of this shell, which need not be the home of the user."""
    (tmp_path / ".ray").mkdir()
    Path(secret(tmp_path / ".ray", KEY)).rename(tmp_path / ".ray" / "auth_token")
    unit = RayUnit(
        inside=False, known=False, user="", asker="root", environment={"HOME": str(tmp_path)}
    )
    token = read_token(wanted(token=True), unit, Path("/"), run)
    assert token is not None
    assert (token.path, token.error, token.mode) == (
        str(tmp_path / ".ray" / "auth_token"),
        "",
        0o600,
    )


def test_a_token_is_seen_and_never_said(tmp_path: Path) -> None:
    """A token gives the permissions of its file; white space alone is no token."""
    unit = RayUnit(
        inside=False,
        known=True,
        user="",
        asker="root",
        environment={"RAY_AUTH_TOKEN_PATH": secret(tmp_path, KEY, 0o640)},
    )
    token = read_token(wanted(token=True), unit, Path("/"), run)
    assert token is not None
    assert (token.error, token.mode) == ("", 0o640)
    secret(tmp_path, " \n")
    token = read_token(wanted(token=True), unit, Path("/"), run)
    assert token is not None
    assert token.error == "it is empty"
    hidden = RayUnit(
        inside=False, known=True, user="", asker="root", environment={"RAY_AUTH_TOKEN": KEY}
    )
    assert KEY not in repr(hidden) + repr(Asker("root", {"RAY_AUTH_TOKEN": KEY}))


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that every user reaches; pytest's own is closed to others than us."""
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        Path(name).chmod(0o755)
        yield Path(name)


@as_root
def test_root_asks_as_the_user_of_the_unit(open_folder: Path) -> None:
    """What root may read and the unit's user may not is closed, by name and by number, groups and all."""
    said = ask(
        BECOME
        + "become(sys.argv[2])\nprint(json.dumps({'ids': [os.getuid(), os.getgid(), *os.getgroups()]}))",
        "",
        str(NOBODY),
        run,
    ).said
    assert said["ids"][0] == NOBODY
    assert 0 not in said["ids"]
    unit = RayUnit(inside=False, known=True, user="nobody", asker="root", environment={})
    found = read_keys(wanted(key_file=secret(open_folder, KEY)), unit, run)
    assert found is not None
    assert found.found == "Permission denied"
    os.chown(open_folder / "secret", NOBODY, -1)
    found = read_keys(wanted(key_file=str(open_folder / "secret")), unit, run)
    assert found is not None
    assert found.count == 1
    (open_folder / "closed").mkdir(0o700)
    assert not read_folder(str(open_folder / "closed"), unit, Path("/"), run).readable
    unit = RayUnit(inside=False, known=True, user="no-such-user", asker="root", environment={})
    found = read_keys(wanted(key_file=str(open_folder / "secret")), unit, run)
    assert found is not None
    assert found.unasked == "this host has no user no-such-user"


def test_a_child_takes_no_module_from_the_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A json.py where somebody runs the checks is not run."""
    (tmp_path / "json.py").write_text("raise SystemExit(7)")
    monkeypatch.chdir(tmp_path)
    assert run(python("import json; print(json.dumps(1))"), 20).text == "1\n"


def test_an_environment_is_read_as_systemd_reads_it(tmp_path: Path) -> None:
    """Quotes, comments, files that are missing, and of two assignments the last."""
    (tmp_path / "a.env").write_text("# A=0\n; B=0\nA=/from/file\n  C='x y'\nnothing\n")
    unit = {
        "User": "ray",
        "Environment": 'A=/from/unit "D=two words"',
        "EnvironmentFiles": "/a.env (ignore_errors=no)\n/none.env (ignore_errors=yes)",
    }
    read = read_ray_unit(unit, tmp_path, Asker("root", {"A": "ours"}))
    assert dict(read.environment) == {"A": "/from/file", "C": "x y", "D": "two words"}
    assert (read.user, read.stranger, read.unread) == ("ray", "", "")
    assert read_ray_unit(unit, tmp_path, Asker("alice", {})).stranger == "ray"
    assert read_ray_unit(unit, tmp_path, Asker("ray", {})).stranger == ""
    assert read_ray_unit(None, tmp_path, Asker("alice", {"A": "ours"})).environment == {"A": "ours"}


MENU = """
set default="${saved_entry}"
menuentry 'Top' --id top {
    linux /vmlinuz-3 ro
}
submenu "More" --id more {
    menuentry 'A > B' --id ab {
        linux /boot/vmlinuz-2 ro
    }
    menuentry Last $menuentry_id_option 'last' {
        linux16 /vmlinuz-1 ro
    }
}
menuentry 'Memory test' {
    linux16 /memtest.bin
}
"""


@pytest.mark.parametrize(
    "entry, kernel",
    [
        ("0", "3"), ("top", "3"), ("Top", "3"), ("", "3"), ("no such entry", "3"), ("9", "3"),
        ("1", "2"), ("1>0", "2"), ("1>1", "1"), ("more>last", "1"), ("More>A >> B", "2"),
        ("more>no such entry", "2"), ("Memory test", ""), ("2", ""),
    ],
)  # fmt: skip
def test_the_next_kernel_is_that_of_grubs_entry(entry: str, kernel: str) -> None:
    """Numbers, titles and ids, in submenus too; what no entry is called starts the first."""
    assert next_release(MENU, {"saved_entry": entry}, "", ["1", "2", "3", "4"]) == kernel


def test_a_release_is_not_found_in_a_longer_one() -> None:
    """6.8.0-8 does not stand in the name of 6.8.0-85, nor 6.1 in 6.1.0."""
    releases = ["6.1", "6.8.0-8", "6.8.0-85"]
    assert next_release("", {}, "Debian, with Linux 6.8.0-85", releases) == "6.8.0-85"
    assert next_release("", {}, "Debian, with Linux 6.1.0-18", releases) == ""
    assert next_release("", {"saved_entry": "id-6.8.0-8"}, "saved", releases) == "6.8.0-8"


@given(st.text(max_size=300), st.text(max_size=40))
def test_no_menu_breaks_the_reader(menu: str, entry: str) -> None:
    """Whatever stands in grub.cfg and grubenv, an installed release, one of the menu, or none comes back."""
    parse_menu(menu)
    own = next_release(menu, {"next_entry": entry, **parse_environment(menu)}, entry, ["1"])
    longer = next_release(MENU + menu, {"next_entry": entry}, entry, ["1"])
    assert own in {"", "1"} or own in menu
    assert longer in {"", "1"} or longer in MENU + menu


def test_a_room_that_judged_nothing_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where every check is skipped the last line says that nothing is known, and only there."""
    check = Check("example", "what is wanted", "driver")
    assert "nothing was judged" in render([check.skipped("no GPU")]).splitlines()[-1]
    assert "nothing was judged" not in render([check.skipped("no GPU"), check.passed("a")])
    monkeypatch.setitem(gate.ROOMS, "gpu", (lambda _: [check.skipped("no GPU")],))
    done = CliRunner().invoke(main, ["check", "gpu", "--json"])
    assert (done.exit_code, json.loads(done.stdout)["status"]) == (0, Status.SKIP)


def test_a_plan_with_gpus_is_not_met_by_a_host_without(monkeypatch: pytest.MonkeyPatch) -> None:
    """`check gpu`, `fabric` and `host` with a plan that wants GPUs end with 4 where none is on the bus."""
    for module in ("gpu", "host"):
        monkeypatch.setattr(f"rayserve.health.facts.{module}.nvidia_devices", lambda _: (0, 0))
    plan = "inventories/example/group_vars/all/plan.yml"
    for room in ("gpu", "fabric", "host"):
        done = CliRunner().invoke(main, ["check", room, "--plan", plan])
        assert (done.exit_code, "none on the PCI bus" in done.stdout) == (4, True), room


def test_links_are_counted_by_the_gpu() -> None:
    """A plan for eight A100-SXM wants 12 NVLinks of each, a folder, keys and Ray's token."""
    plan = wanted_of(read_plan("inventories/example/group_vars/all/plan.yml"))
    assert (plan.links, plan.link_gb_s) == (12, 300.0)
    assert (plan.key_file, plan.token) == ("/etc/rayserve/api_keys", True)
    assert plan.without_gpus == ""
