"""Run by test_imports.py: imports each module named on stdin in a process of its own, with warnings as errors.

A fork for each module and not an interpreter for each: they all start from the same bare state, at a tenth of the cost.
What is named on the command line is imported before the forks (other people's packages, so that each is paid for once).
Prints one JSON object a line: {"module", "error", "cpu_s", "loaded": [our and forbidden modules that came with it]}.
"""

import importlib
import json
import os
import sys
import time
import warnings


def main() -> None:
    for name in sys.argv[1:]:
        importlib.import_module(name)
    for line in sys.stdin:
        sys.stdout.flush()
        pid = os.fork()
        if pid == 0:
            _import(line.strip())
            sys.stdout.flush()
            os._exit(0)
        os.waitpid(pid, 0)


def _import(name: str) -> None:
    warnings.simplefilter("error")
    begun, error = time.process_time(), ""
    try:
        importlib.import_module(name)
    except (Exception, SystemExit) as e:  # reported to the test, which fails with it
        error = f"{type(e).__name__}: {e}"
    cpu_s = time.process_time() - begun
    loaded = [m for m in sys.modules if m in ("torch", "nixl") or m.startswith("splitserve.")]
    print(json.dumps({"module": name, "error": error, "cpu_s": cpu_s, "loaded": loaded}))


if __name__ == "__main__":
    main()
