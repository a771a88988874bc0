"""The command `logra`: finds the subcommand and turns errors into one line and an exit code.

Exit codes: 0 done, 1 interrupted or a check that found something, 2 a setting or an input that cannot be used. An output
that nobody reads any more (`logra ... | head`) interrupts without a word.
"""

import os
import select
import sys
from collections.abc import Sequence

from logra.errors import LograError, OtherProcessError

COMMANDS = {
    "train": "train a model by reinforcement learning",
    "plan": "say what memory a training would take, without a GPU",
    "replay": "rebuild, check or compare the weights of a run at any step",
    "report": "write a report of one or several runs, an HTML file",
    "bench": "run a benchmark, print its table, find regressions",
}

USAGE = f"""usage: logra COMMAND [options]

Reinforcement learning of the full weights of language models from low-rank gradient sketches.

commands:
{chr(10).join(f"  {name:8}{summary}" for name, summary in COMMANDS.items())}

logra COMMAND --help shows the options of a command, their defaults and units.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: arguments without the program's name; None takes those of the process.

    Returns:
        The exit code.
    """
    try:
        try:
            code = _run(list(sys.argv[1:] if argv is None else argv))
        except SystemExit:  # of a parser, whose help may still wait in the buffer
            print(end="", flush=True)
            raise
        print(end="", flush=True)  # here, not at the end of the process, where nobody can catch what goes wrong
        return code
    except BrokenPipeError:
        if not _drop_closed_outputs():
            raise  # of some other pipe
        return 1


def _run(arguments: Sequence[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help"):
        print(USAGE, end="")
        return 0 if arguments else 2
    if arguments[0] == "--version":
        from logra import __version__

        print(f"logra {__version__}")
        return 0
    if arguments[0] not in COMMANDS:
        print(f"logra: unknown command {arguments[0]!r}. Commands: {', '.join(COMMANDS)}", file=sys.stderr)
        return 2
    try:
        return {"train": _train, "plan": _plan, "replay": _replay, "report": _report, "bench": _bench}[arguments[0]](
            arguments[1:]
        )
    except LograError as error:
        # The process that met it says so too.
        if not isinstance(error, OtherProcessError) or os.environ.get("RANK") == "0":
            print(f"logra {arguments[0]}: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt as interrupt:
        print(f"logra {arguments[0]}: interrupted. {interrupt}".rstrip(), file=sys.stderr)
        return 1
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] == "logra":
            raise
        extra = "report" if error.name.partition(".")[0] == "matplotlib" else "rl"
        print(f"logra {arguments[0]} needs the package {error.name}: pip install 'logra[{extra}]'", file=sys.stderr)
        return 2


def _drop_closed_outputs() -> bool:
    """Whether the reader of standard output or standard error has gone. What is still written there goes to /dev/null."""
    poll = select.poll()
    for output in (1, 2):
        poll.register(output, 0)
    closed = [output for output, event in poll.poll(0) if event & (select.POLLERR | select.POLLHUP)]
    for output in closed:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, output)
        os.close(nowhere)
    return bool(closed)


def _train(arguments: Sequence[str]) -> int:
    from logra.cli.train import parse

    config = parse(arguments)
    from logra.rl.run import train  # TRL takes seconds to import; a wrong flag should not

    outcome = train(config)
    import torch.distributed as dist

    from logra.cli.report import report_of_finished

    if dist.is_initialized():
        dist.destroy_process_group()
    if outcome.leads and outcome.folder.exists():
        print(report_of_finished(outcome.folder))
    return 1 if outcome.interrupted else 0


def _plan(arguments: Sequence[str]) -> int:
    from logra.cli.plan import plan_command

    return plan_command(arguments)


def _replay(arguments: Sequence[str]) -> int:
    from logra.cli.replay import replay_command

    return replay_command(arguments)


def _report(arguments: Sequence[str]) -> int:
    from logra.cli.report import report_command

    return report_command(arguments)


def _bench(arguments: Sequence[str]) -> int:
    from logra.cli.bench import bench_command

    return bench_command(arguments)


if __name__ == "__main__":
    sys.exit(main())
