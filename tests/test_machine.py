"""Machines: descriptions that come with packhorse, files of users, and what is wrong with some of them."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

import packhorse as ph
from packhorse import machine as machines

GOOD = """
name = "small"
device = "cpu"
cores = 2
sources = ["measured"]
[memory]
host = "16GB"
disk = "100GB"
[matmul]
fp32 = 1e11
bf16 = 1e10
fp16 = 1e10
[bandwidth]
device = 2e10
host = 2e10
read = 1e9
write = 1e9
"""


@pytest.mark.parametrize("file", sorted(machines.DESCRIPTIONS.glob("*.toml")), ids=lambda f: f.stem)
def test_every_description_loads_and_names_its_sources(file: Path) -> None:
    machine = ph.Machine.load(file.stem)
    assert machine.sources and machine.memory["host"] > 1e9
    assert machine.rate("matmul", "fp32") > 1e9 and machine.rate("elementwise") > 1e9
    assert ("link" in machine.bandwidth) == (machine.device != "cpu")


def test_a_file_of_a_user_loads(tmp_path: Path) -> None:
    path = tmp_path / "small.toml"
    path.write_text(GOOD)
    assert ph.Machine.load(path).memory == {"host": 16_000_000_000, "disk": 100_000_000_000}


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("fp32 = 1e11", "", "matmul.fp32 is missing"),
        ("read = 1e9", "", "bandwidth.read is missing"),
        ("read = 1e9", "read = -5", "bandwidth.read is -5, expected a rate a second between"),
        ("read = 1e9", "read = 1e30", "bandwidth.read is 1e"),
        ("read = 1e9", "read = 'fast'", "bandwidth.read is 'fast'"),
        ('host = "16GB"', "", "memory.host is missing"),
        ('host = "16GB"', 'host = "16 parsecs"', "parsecs"),
        ('host = "16GB"', 'host = "1"', "memory.host is 1 B"),
        ("cores = 2", "cores = 0", "cores is 0"),
        ("cores = 2", "", "'cores' is missing"),
        ("cores = 2", "cores = 2\ncolour = 1", "unknown entry 'colour'"),
        ("[matmul]", "[matmul", "no TOML"),
        ('host = "16GB"\ndisk = "100GB"', "", "memory.host is missing"),
        ("[memory]", "[[memory]]", "memory is"),
    ],
)
def test_a_wrong_file_is_refused_with_the_figure_that_is_wrong(
    tmp_path: Path, old: str, new: str, message: str
) -> None:
    path = tmp_path / "wrong.toml"
    path.write_text(GOOD.replace(old, new))
    with pytest.raises(ph.PackhorseError, match=f"(?s)wrong.toml.*{message}"):
        ph.Machine.load(path)


def test_an_unknown_machine_lists_those_that_come_along() -> None:
    with pytest.raises(ph.MachineError, match=r"no machine 'cray': give a TOML file, 'here', or one of .*v100-16gb"):
        ph.Machine.load("cray")


def test_a_probe_is_kept_for_the_next_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    measured = []

    def measure(place: Path, device: str) -> dict[str, Any]:
        measured.append(place)
        return dataclasses.asdict(ph.Machine.load("laptop")) | {"is_here": True, "name": f"number {len(measured)}"}

    monkeypatch.setattr(machines, "_measure_in_child", measure)
    assert ph.Machine.probe().name == "number 1"
    assert ph.Machine.probe().name == "number 1"
    assert ph.Machine.probe(fresh=True).name == "number 2"
    next((tmp_path / "packhorse").iterdir()).write_text("{")
    assert ph.Machine.probe().name == "number 3", "what cannot be read is measured again"
