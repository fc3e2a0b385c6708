"""The command line, as a person uses it."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
from typer.testing import CliRunner

from packhorse import cli
from packhorse.cli import app

USER_MODEL = """
import torch
from torch import nn

def build():
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Linear(8, 8), nn.Linear(8, 2))
    return model, (torch.zeros(4, 8), torch.zeros(4, dtype=torch.long)), lambda o, b: nn.functional.cross_entropy(o, b[1])

def nothing():
    return 3
"""


class Done(NamedTuple):
    code: int
    out: str
    err: str


Command = Callable[..., Done]


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """The command as it is installed, in this process, whose imports it shares."""

    def run(*arguments: str) -> Done:
        monkeypatch.setattr(sys, "argv", ["packhorse", *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        code = ended.value.code
        return Done(code if isinstance(code, int) else 0, *capsys.readouterr())

    return run


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["inspect", *arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_a_built_in_model_as_a_table() -> None:
    text = run("gpt-tiny", "--segments", "3")
    assert "GPT" in text and "modules" in text and "tied: tokens.weight = head.weight" in text


def test_json_has_what_the_table_has() -> None:
    described = json.loads(run("gpt-tiny", "--segments", "3", "--json", "--cuts"))
    assert len(described["segments"]) == 3
    assert sum(s["flops"] for s in described["segments"]) == described["flops"]
    assert {"modules", "parameters", "nbytes", "flops", "inputs", "outputs", "cut_nbytes"} <= described["segments"][
        0
    ].keys()
    assert len(described["cuts"]) == described["nodes"] - 1


def test_a_function_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(USER_MODEL)
    text = run(f"{file}:build", "--cuts", "--segments", "2")
    assert "no: relu_ in 1 writes in place into what linear in 0 made" in " ".join(text.split())
    pinned = json.loads(run(f"{file}:build", "--cut", "1", "--json"))
    assert [s["modules"][-1] for s in pinned["segments"]] == ["1", "3"]
    limited = json.loads(run(f"{file}:build", "--max-bytes", "1KiB", "--json"))
    assert all(s["nbytes"] <= 1024 for s in limited["segments"])


def test_a_hugging_face_config(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is an extra and not installed")
    config = transformers.BertConfig(
        num_hidden_layers=2, hidden_size=32, num_attention_heads=2, intermediate_size=64, vocab_size=64
    )
    config.architectures = ["BertForMaskedLM"]
    config.save_pretrained(tmp_path)
    described = json.loads(run(str(tmp_path), "--json"))
    assert described["model"] == "BertForMaskedLM" and not described["opaque"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["gtp2"], "unknown MODEL 'gtp2': did you mean gpt2"),
        (["mlp", "--segments", "99"], "99 segments asked"),
        (["mlp", "--segments", "two"], "expected a number or 'finest'"),
        (["mlp", "--max-bytes", "much"], "no amount of memory"),
        (["mlp", "--mode", "sleep"], "mode is 'sleep'"),
    ],
)
def test_wrong_input_is_one_line_and_exit_code_2(command: Command, arguments: list[str], message: str) -> None:
    done = command("inspect", *arguments)
    assert done.code == 2 and message in done.err and "Traceback" not in done.err


def test_a_function_that_returns_no_model(command: Command, tmp_path: Path) -> None:
    file = tmp_path / "other.py"
    file.write_text(USER_MODEL)
    done = command("inspect", f"{file}:nothing")
    assert done.code == 2 and "returned int, expected (model, example)" in done.err


def test_train_shows_plan_progress_and_memory(command: Command, tmp_path: Path) -> None:
    store = str(tmp_path / "store")
    flags = ["--model", "gpt-tiny", "--data", "python", "--store", store, "--rows", "4", "--microbatches", "2"]
    done = subprocess.run(  # in a process of its own, as wide as its lines need
        [sys.executable, "-m", "packhorse", "train", *flags, "--steps", "2"],
        capture_output=True,
        text=True,
        env={**os.environ, "COLUMNS": "200"},
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    for text in ("relay, 6 segments", "step 2: loss", "planned and measured: time", "host memory"):
        assert text in done.stdout
    refused = command("train", *flags, "--steps", "3")
    assert refused.code == 2 and "holds a run at step 2" in refused.err
    resumed = command("train", *flags, "--steps", "3", "--resume", "--json")
    assert [json.loads(line)["step"] for line in resumed.out.splitlines()] == [3]
    whole = command(
        "train", *flags[:4], "--rows", "4", "--microbatches", "2", "--steps", "3", "--strategy", "relay", "--json"
    )
    assert json.loads(whole.out.splitlines()[-1])["loss"] == json.loads(resumed.out)["loss"]


def test_train_refuses_data_that_does_not_fit(command: Command) -> None:
    for flags, message in (
        (["--model", "gpt-tiny", "--data", "nowhere.txt"], "there is no such file"),
        (["--model", "mlp", "--data", "python"], "mlp does not take text"),
        (["--model", "gpt-tiny", "--optimizer", "adam"], "--optimizer is 'adam', expected one of adamw"),
        (["--model", "gpt-tiny", "--memory", "1MiB"], "the smallest budget that works"),
    ):
        done = command("train", *flags)
        assert done.code == 2 and message in " ".join(done.err.split()), done.err


def test_verify(command: Command, tmp_path: Path) -> None:
    done = command("verify", "gpt-tiny", "--steps", "2", "--json")
    assert done.code == 0, done.err
    found = json.loads(done.out)
    assert found["ok"] and found["identical"] == len(found["values"])
    shown = command("verify", "mlp", "--store", str(tmp_path), "--clip-norm", "0.1")
    assert shown.code == 0 and "same numbers" in shown.out
