"""A host made of recorded texts: files of /proc and /sys in a folder, and what commands would print.

The base is a sound host of eight A100-SXM behind six NVSwitches, as its parts are documented; a case
changes what it is about. Names and numbers of the base are synthetic, its formats are those of
`nvidia-smi -q -x` 575 (DTD v12), util-linux' dmesg, dpkg, lspci and systemd.
"""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rayserve.health.checks.fabric import BandwidthFact, check_fabric
from rayserve.health.checks.gpu import check_gpu
from rayserve.health.checks.host import check_host
from rayserve.health.checks.host_facts import Listener
from rayserve.health.checks.wanted import Wanted
from rayserve.health.facts.as_user import FOLDER, KEYS, TOKEN
from rayserve.health.facts.gpu import PROBE, read_fabric_facts, read_gpu_facts
from rayserve.health.facts.host import read_host_facts
from rayserve.health.facts.ray_unit import Asker
from rayserve.health.facts.run import Output
from rayserve.health.gate import measured
from rayserve.health.results import CheckResult
from rayserve.units import GIB

KERNEL, DRIVER = "6.8.0-85-generic", "580.95.05"
GPUS, SWITCHES = 8, 6
WANTED = Wanted(
    gpus=GPUS,
    model="A100-80GB-SXM",
    label="A100",
    memory_mib=81152,
    link_gb_s=300.0,
    ports=(6379, 8265, 8000),
    model_path="/srv/models/m",
    links=12,
    key_file="/etc/rayserve/api_keys",
    token=True,
)
GPU_XML = """
<gpu id="00000000:{bus}:00.0">
  <product_name>NVIDIA A100-SXM4-80GB</product_name>
  <persistence_mode>Enabled</persistence_mode>
  <mig_mode><current_mig>Disabled</current_mig><pending_mig>Disabled</pending_mig></mig_mode>
  <uuid>GPU-00000000-0000-0000-0000-0000000000{bus}</uuid>
  <gpu_recovery_action>None</gpu_recovery_action>
  <pci><pci_gpu_link_info>
    <link_widths><max_link_width>16x</max_link_width><current_link_width>16x</current_link_width></link_widths>
  </pci_gpu_link_info></pci>
  <clocks_event_reasons>
    <clocks_event_reason_gpu_idle>Active</clocks_event_reason_gpu_idle>
    <clocks_event_reason_sw_power_cap>Not Active</clocks_event_reason_sw_power_cap>
    <clocks_event_reason_hw_slowdown>Not Active</clocks_event_reason_hw_slowdown>
    <clocks_event_reason_hw_thermal_slowdown>Not Active</clocks_event_reason_hw_thermal_slowdown>
    <clocks_event_reason_hw_power_brake_slowdown>Not Active</clocks_event_reason_hw_power_brake_slowdown>
    <clocks_event_reason_sw_thermal_slowdown>Not Active</clocks_event_reason_sw_thermal_slowdown>
  </clocks_event_reasons>
  <fb_memory_usage>
    <total>81920 MiB</total><reserved>640 MiB</reserved><used>4 MiB</used><free>81277 MiB</free>
  </fb_memory_usage>
  <ecc_mode><current_ecc>Enabled</current_ecc><pending_ecc>Enabled</pending_ecc></ecc_mode>
  <ecc_errors>
    <volatile>
      <sram_correctable>0</sram_correctable>
      <sram_uncorrectable_parity>0</sram_uncorrectable_parity>
      <sram_uncorrectable_secded>0</sram_uncorrectable_secded>
      <dram_correctable>0</dram_correctable>
      <dram_uncorrectable>0</dram_uncorrectable>
    </volatile>
    <aggregate><dram_uncorrectable>3</dram_uncorrectable></aggregate>
  </ecc_errors>
  <remapped_rows>
    <remapped_row_corr>0</remapped_row_corr>
    <remapped_row_unc>1</remapped_row_unc>
    <remapped_row_pending>No</remapped_row_pending>
    <remapped_row_failure>No</remapped_row_failure>
  </remapped_rows>
  <utilization><gpu_util>0 %</gpu_util><memory_util>0 %</memory_util></utilization>
  <fabric><state>N/A</state><status>N/A</status></fabric>
  <processes></processes>
</gpu>"""
BUSES = ("07", "0f", "47", "4e", "87", "90", "b7", "bd")


def smi_xml(
    changes: Sequence[Mapping[str, Any]] = (), *, gpus: int = GPUS, driver: str = DRIVER
) -> str:
    """`nvidia-smi -q -x` of the base; a change is `{gpu: N or all, set: {path: text}, add: xml}`."""
    body = "".join(GPU_XML.format(bus=bus) for bus in BUSES[:gpus])
    root = ET.fromstring(
        f"<nvidia_smi_log><driver_version>{driver}</driver_version>"
        f"<attached_gpus>{gpus}</attached_gpus>{body}</nvidia_smi_log>"
    )
    nodes = root.findall("gpu")
    for change in changes:
        which = nodes if change["gpu"] == "all" else [nodes[change["gpu"]]]
        for node in which:
            for path, text in change.get("set", {}).items():
                found = node.find(path)
                assert found is not None, f"the base has no {path}"
                found.text = text
            for path, xml in change.get("add", {}).items():
                parent = node.find(path)
                assert parent is not None, f"the base has no {path}"
                parent.append(ET.fromstring(xml))
            for path in change.get("drop", []):
                above, _, name = path.rpartition("/")
                parent = node.find(above) if above else node
                assert parent is not None, f"the base has no {path}"
                parent.remove(parent.find(name))  # type: ignore[arg-type]
    return '<?xml version="1.0" ?>\n' + ET.tostring(root, encoding="unicode")


def topo(way: str, odd: Mapping[str, str] | None = None, *, gpus: int = GPUS) -> str:
    """A table of `nvidia-smi topo`; `odd` has other ways, by `row-column`."""
    lines = ["\t" + "\t".join(f"GPU{n}" for n in range(gpus)) + "\tCPU Affinity\tNUMA Affinity"]
    for row in range(gpus):
        cells = []
        for column in range(gpus):
            pair = f"{min(row, column)}-{max(row, column)}"
            cells.append(" X " if row == column else (odd or {}).get(pair, way))
        lines.append(f"GPU{row}\t" + "\t".join(cells) + "\t0-63\t0")
    return "\n".join([*lines, "", "Legend:", "  X = Self", "  NV# = a bonded set of # NVLinks"])


RAY_PID = "4242"
UNITS: dict[str, dict[str, str]] = {
    "ray.service": {
        "MainPID": RAY_PID,
        "User": "rayserve",
        "LimitNOFILESoft": "1048576",
        "LimitMEMLOCKSoft": "infinity",
        "EnvironmentFiles": "/etc/rayserve/ray.env (ignore_errors=no)",
    },
    "nvidia-fabricmanager.service": {"MainPID": "900", "LimitNOFILESoft": "20000"},
    "nvidia-persistenced.service": {"MainPID": "901", "LimitNOFILESoft": "1024"},
}


def systemctl(changes: Mapping[str, Mapping[str, str]]) -> str:
    """`systemctl show` of the units of the base, changed by a case: a block for each."""
    found = {"LoadState": "loaded", "ActiveState": "active", "UnitFileState": "enabled"}
    blocks = (
        {"Id": name, **found, **unit, **changes.get(name, {})} for name, unit in UNITS.items()
    )
    return "\n\n".join(
        "\n".join(f"{key}={value}" for key, value in block.items()) for block in blocks
    )


def limits(nofile: str, memlock: str) -> str:
    """/proc/PID/limits: soft and hard, the two lines that are looked at among others."""
    rows = (
        ("Limit", "Soft Limit", "Hard Limit", "Units"),
        ("Max core file size", "0", "unlimited", "bytes"),
        ("Max open files", nofile, "1048576", "files"),
        ("Max locked memory", memlock, "unlimited", "bytes"),
        ("Max nice priority", "0", "0", ""),
    )
    return "\n".join(f"{a:<26}{b:<21}{c:<21}{d:<10}" for a, b, c, d in rows) + "\n"


FOLDER_ANSWER = {
    "readable": True,
    "empty": False,
    "writable": True,
    "read_only": False,
    "free_bytes": 900 * GIB,
    "size_bytes": 1000 * GIB,
}
"""Of the child that looks at a folder of the base."""
PATHS: dict[str, Any] = {
    "folder /var/lib/ray": FOLDER_ANSWER,
    "folder /srv/models/m": FOLDER_ANSWER,
    "folder /var/cache/kv": {**FOLDER_ANSWER, "empty": True},
    "keys /etc/rayserve/api_keys": {"count": 2},
    "token /etc/rayserve/ray_token": {"empty": False, "mode": 0o400},
}
MISSING = {"error": "No such file or directory", "missing": True}
PROGRAMS = {PROBE: "cuda", FOLDER: "folder", KEYS: "keys", TOKEN: "token"}


def base_files() -> dict[str, str]:
    """Files of the base, by path from the root."""
    files = {
        "proc/sys/kernel/osrelease": f"{KERNEL}\n",
        "proc/modules": "nvidia 104000000 8 nvidia_uvm, Live 0x0\nnvidia_uvm 4000000 0 - Live 0x0\n",
        "proc/swaps": "Filename\tType\tSize\tUsed\tPriority\n/swap.img file 8388604 0 -2\n",
        "proc/mdstat": "Personalities : [raid0]\nmd0 : active raid0 nvme1n1[1] nvme0n1[0]\n"
        "      7501211648 blocks super 1.2 512k chunks\n\nunused devices: <none>\n",
        "proc/cmdline": f"BOOT_IMAGE=/vmlinuz-{KERNEL} root=/dev/md1 ro iommu=pt\n",
        "proc/self/mounts": "/dev/md1 / ext4 rw 0 0\n",
        "sys/module/nvidia/version": f"{DRIVER}\n",
        "sys/firmware/efi/fw_platform_size": "64\n",
        f"lib/modules/{KERNEL}/build/Makefile": "",
        f"lib/modules/{KERNEL}/updates/dkms/nvidia.ko.zst": "",
        f"boot/vmlinuz-{KERNEL}": "",
        "etc/default/grub": "GRUB_DEFAULT=0\n",
        "etc/rayserve/ray.env": "# as the role `ray` writes it\nRAY_AUTH_TOKEN_PATH=/etc/rayserve/ray_token\n"
        "RAY_TMPDIR=/var/lib/ray\n",
        "proc/self/cgroup": "0::/user.slice/user-0.slice/session-3.scope\n",
        "proc/self/limits": limits("1024", "8388608"),
        f"proc/{RAY_PID}/limits": limits("1048576", "unlimited"),
        f"usr/lib/x86_64-linux-gnu/libnvidia-ml.so.{DRIVER}": "",
        "tmp/.keep": "",
        "dev/shm/.keep": "",
    }
    for number in range(GPUS):
        files |= _pci(f"0000:{BUSES[number]}:00.0", "0x030200")
    for number in range(SWITCHES):
        files |= _pci(f"0000:c{number}:00.0", "0x068000")
    return files


def _pci(address: str, kind: str) -> dict[str, str]:
    folder = f"sys/bus/pci/devices/{address}"
    return {f"{folder}/vendor": "0x10de\n", f"{folder}/class": f"{kind}\n"}


PACKAGES = ("nvidia-open", "nvidia-fabricmanager", "libnvidia-compute-580", f"linux-image-{KERNEL}")
BASE_COMMANDS: dict[str, str] = {
    "nv-fabricmanager --version": f"Fabric Manager version is : {DRIVER}\n",
    f"modinfo -F version -k {KERNEL} nvidia": f"{DRIVER}\n",
    "modinfo -F signer nvidia": "host Secure Boot Module Signature key\n",
    "dpkg-query -W -f ${db:Status-Abbrev} ${Package}\n": "".join(
        f"ii  {name}\n" for name in (*PACKAGES, "nvidia-container-toolkit", "bash")
    ),
    "apt-mark showhold": "\n".join(PACKAGES) + "\n",
    "chronyc -n tracking": "System time     : 0.000012345 seconds slow of NTP time\n"
    "Leap status     : Normal\n",
    "lspci -vvv": "00:01.0 PCI bridge: Intel Corporation Device 347a\n"
    "\t\tACSCtl:\tSrcValid- TransBlk- ReqRedir- CmpltRedir- UpstreamFwd-\n",
    "systemd-detect-virt --vm": "none\n",
    "dmesg --time-format iso": "2026-01-01T00:00:00,000000+00:00 Linux version 6.8.0-85-generic\n",
    "nvidia-smi topo -m": topo("NV12"),
    "nvidia-smi topo -p2p n": topo("OK"),
}


class RecordedHost:
    """The base, changed by one case."""

    def __init__(self, root: Path, case: Mapping[str, Any]) -> None:
        self._root = root
        self._case = case
        files = base_files()
        for path in case.get("without", []):
            files = {name: text for name, text in files.items() if not name.startswith(path)}
        files |= case.get("files", {})
        for name, text in files.items():
            place = root / name
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text(text)
        if "sys/firmware/efi/fw_platform_size" in files:
            variables = root / "sys/firmware/efi/efivars"
            variables.mkdir(exist_ok=True)
            flag = bytes([6, 0, 0, 0, int(case.get("secure_boot", False))])
            (variables / "SecureBoot-8be4df61-93ca-11d2-aa0d-00e098032b8c").write_bytes(flag)
        library = case.get("library", DRIVER)
        link = root / "usr/lib/x86_64-linux-gnu/libnvidia-ml.so.1"
        if library:
            (link.parent / f"libnvidia-ml.so.{library}").touch()
            link.symlink_to(f"libnvidia-ml.so.{library}")
        smi = case.get("smi", {})
        self._commands: dict[str, str | None] = {
            **BASE_COMMANDS,
            "nvidia-smi -q -x": smi_xml(smi.get("changes", []), gpus=smi.get("gpus", GPUS)),
            "cuda": '{"code": 0, "devices": 8}\n',
            "systemctl show": systemctl(case.get("units", {})),
            **case.get("commands", {}),
        }
        if "topo" in case:
            self._commands["nvidia-smi topo -m"] = topo(**case["topo"])
        if "peers" in case:
            self._commands["nvidia-smi topo -p2p n"] = topo(**case["peers"])
        if "log" in case:
            journal = "journalctl --dmesg --boot --no-pager --output short-iso"
            self._commands[journal] = case["log"] or "-- No entries --\n"

    def run(self, command: Sequence[str], timeout_s: float) -> Output:
        """What the command would have printed; `!…` in a case is how it ended."""
        name = " ".join(command)
        if command[:2] == ["systemctl", "show"]:
            name = "systemctl show"
        program = next((what for code, what in PROGRAMS.items() if code in command), "")
        if program == "cuda":
            name = program
        elif program:
            return self._path(f"{program} {command[-3]}", command[-2], timeout_s)
        text = self._commands.get(name)
        if text is None:
            return Output(ending=f"{command[0]} is not installed")
        if text.startswith("!"):
            ending, _, said = text[1:].partition("\n")
            return Output(said, ending.format(timeout_s=timeout_s))
        return Output(text)

    def _path(self, name: str, user: str, timeout_s: float) -> Output:
        """What the child finds that looks at a path: the base's answer with what the case changes."""
        assert user in ("", "rayserve")
        change = self._case.get("paths", {}).get(name, {})
        if isinstance(change, str):
            return Output(ending=change.format(timeout_s=timeout_s))
        return Output(json.dumps({**PATHS.get(name, MISSING), **change}) + "\n")

    def results(self) -> dict[str, CheckResult]:
        """All verdicts on it, by name."""
        case = self._case
        wanted = None if case.get("unplanned") else replace(WANTED, **case.get("wanted", {}))
        ports = tuple(Listener(*one) for one in case.get("listeners", []))
        host = read_host_facts(
            wanted,
            root=self._root,
            run=self.run,
            listeners=lambda: ports,
            asker=Asker(case.get("asker", "root"), case.get("environment", {})),
        )
        host = replace(host, **{"shm_bytes": 512 * GIB, **case.get("facts", {})})
        gpu = read_gpu_facts(root=self._root, run=self.run)
        fabric = read_fabric_facts(root=self._root, run=self.run)
        if "all_reduce" in case:
            fabric = measured(fabric, lambda: BandwidthFact(GPUS, 2**30, **case["all_reduce"]))
        found = [
            *check_host(host, wanted),
            *check_gpu(gpu, wanted, before_start=case.get("before_start", True)),
            *check_fabric(fabric, wanted),
        ]
        return {result.name: result for result in found}
