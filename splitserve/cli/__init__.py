"""The `splitserve` command: reads words, calls a part, prints what came of it. Each part is imported when it is called.

Exit codes: 0 done, 1 it ran and failed, 2 the input or configuration is wrong, 130 Ctrl-C. An error is one line
`error: ...` and, where there is one, a line `fix: ...` on stderr; SPLITSERVE_DEBUG=1 shows the traceback instead.

argparse and not a friendlier library: `splitserve --help` must take less than 0.3 s, and every child starts here too.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Sequence

from splitserve.errors import ConfigError, SplitserveError

PROGRAM = (sys.executable, "-m", "splitserve")


_LOOK = "`splitserve doctor` checks this machine"
_FIXES = {
    errno.ENOSPC: "free space: run files and logs are where XDG_RUNTIME_DIR says, caches where XDG_CACHE_HOME does",
    errno.EMFILE: "allow this user more open files: `ulimit -n`",
}


def main(argv: Sequence[str] | None = None, *, program: tuple[str, ...] = PROGRAM) -> int:
    """Run one command and return its exit code. Raises nothing but SystemExit for --help and --version.

    `program` is how a supervisor starts its children, and --detach itself.
    """
    try:
        from splitserve.cli.parser import parse

        args = parse(sys.argv[1:] if argv is None else argv)
        args.program = program
        code: int = args.run(args)
        sys.stdout.flush()
    except ConfigError as e:
        return _failed(e, 2)
    except SplitserveError as e:
        return _failed(e, 1)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # whoever read our output has gone, as in `splitserve logs | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as e:  # a full disk, no descriptors, no permission: the machine's state, and no bug
        if _debug():
            raise
        where = f": {e.filename}" if e.filename else ""
        return complain(f"{e.strerror or e}{where}", _FIXES.get(e.errno or 0, _LOOK), code=1)
    except (
        Exception
    ) as e:  # the border to a person: a bug is one line too, and the traceback is one variable away
        if _debug():
            raise
        return complain(f"{type(e).__name__}: {e}", "this is a bug; SPLITSERVE_DEBUG=1 shows where", code=1)
    return code


def complain(error: str, fix: str | None = None, *, code: int) -> int:
    """Print one error in the form that all commands use; returns `code`."""
    print(f"error: {error}", file=sys.stderr)
    if fix:
        print(f"fix: {fix}", file=sys.stderr)
    return code


def _failed(e: SplitserveError, code: int) -> int:
    if _debug():
        raise e
    return complain(e.message, e.fix, code=code)


def _debug() -> bool:
    return bool(os.environ.get("SPLITSERVE_DEBUG"))
