"""The command line: help, errors, exit codes."""

import os
import subprocess
import sys

import pytest

import logra
from logra.cli import main as command_line
from logra.cli.main import main


def test_help_lists_the_commands(capsys):
    assert main(["--help"]) == 0
    assert "train " in capsys.readouterr().out
    assert main([]) == 2


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"logra {logra.__version__}\n"


def test_an_unknown_command(capsys):
    assert main(["trian"]) == 2
    assert "unknown command 'trian'. Commands: train" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--method", "sgd"], "method='sgd': one of logra, paper, adamw, lora"),
        (["--rollout.num-samples", "1"], "rollout.num_samples=1"),
        (["--logra.rank", "0"], " logra.rank=0"),
        (["--trust.kl-budget", "-1"], " trust.kl_budget=-1"),
        (["--logra.trust", "logra.TrustRegion"], "logra.trust: set the trust region in the group trust"),
        (["--logra.weight-decay", "5000", "--trust.alpha-max", "1000"], " logra.weight_decay=5000"),
        (["--adamw.lr", "-1", "--method", "adamw"], " adamw.lr=-1"),
        (["--method", "adamw", "--logra.rank", "8"], "has no effect with method=adamw"),
        (["--task", "chainsum"], "Did you mean chain_sum"),
        (["--model", "./nowhere"], "nor an existing folder"),
        (["--model", "~nobody-here/m"], "nor an existing folder"),
    ],
)
def test_errors_are_one_line_and_exit_code_2(arguments, message, capsys, tmp_path):
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        try:
            code = main(["train", "--output-dir", "run", *arguments])
        except SystemExit as stop:  # what the parser itself refuses
            code = stop.code
    captured = capsys.readouterr()
    assert code == 2
    assert message in captured.err
    assert "Traceback" not in captured.err


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--output-dir", "x", "--no-such-flag", "1"],
        ["--output-dir", "x", "--run.seed", "a"],
        ["--output-dir", "x", "--loss.loss-type", "dapoo"],
    ],
)
def test_the_parser_refuses(arguments, capsys):
    with pytest.raises(SystemExit) as stop:
        main(["train", *arguments])
    assert stop.value.code == 2
    assert "error" in capsys.readouterr().err


def test_an_interrupt_is_one_line_and_exit_code_1(monkeypatch, capsys):
    def interrupted(config):
        raise KeyboardInterrupt("x holds config.yaml: no model was saved.")

    monkeypatch.setattr("logra.rl.run.train", interrupted)
    assert main(["train", "--output-dir", "x"]) == 1
    assert capsys.readouterr().err == "logra train: interrupted. x holds config.yaml: no model was saved.\n"


def test_a_missing_package_is_named(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "jsonargparse", None)
    monkeypatch.delitem(sys.modules, "logra.cli.train", raising=False)
    assert main(["train", "--output-dir", "x"]) == 2
    assert "needs the package jsonargparse: pip install 'logra[rl]'" in capsys.readouterr().err


def test_help_and_errors_do_not_wait_for_trl():
    code = (
        "import sys\nfrom logra.cli.main import main\n"
        "try: main(['train', '--help'])\nexcept SystemExit: pass\n"
        "assert 'trl' not in sys.modules and 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)


OF_A_RUN = (  # rich answers a closed output itself: its code is the one that the other commands follow
    "import sys\nfrom logra.cli import main\nfrom logra.rl.display import make_display\n"
    "main._train = lambda arguments: make_display(1).say('saved')\n"
    "sys.exit(main.main(['train']))"
)


@pytest.mark.parametrize(
    ("arguments", "unbuffered"),
    [
        (["-m", "logra.cli.main", "--help"], "1"),
        (["-m", "logra.cli.main", "plan", "--help"], ""),
        (["-c", OF_A_RUN], ""),
    ],
    ids=["written at once", "a parser's, written at the end", "of a run"],
)
def test_an_output_that_nobody_reads_ends_the_command_quietly(arguments, unbuffered):
    """Catches the traceback of a print, and what Python says when it cannot empty the buffer at the end (exit code 120)."""
    read_end, write_end = os.pipe()
    os.close(read_end)
    environment = os.environ | {"PYTHONUNBUFFERED": unbuffered}
    command = [sys.executable, *arguments]
    try:
        done = subprocess.run(command, stdout=write_end, stderr=subprocess.PIPE, text=True, env=environment)
    finally:
        os.close(write_end)
    assert (done.returncode, done.stderr) == (1, "")


def test_another_pipe_that_breaks_is_an_error(monkeypatch):
    def broken(arguments):
        raise BrokenPipeError("of a worker")

    monkeypatch.setattr(command_line, "_plan", broken)
    with pytest.raises(BrokenPipeError, match="of a worker"):
        main(["plan"])
