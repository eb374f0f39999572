"""deploy/demo.sh, with a `splitserve` that only pretends: what it makes of a bench in which requests fail."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

DEMO = Path(__file__).parents[2] / "deploy" / "demo.sh"

SPLITSERVE = """#!/bin/bash
case "$1" in
up) sleep 30 >/dev/null 2>&1 & echo $! >"$PRETENDED/pid" ;;
status) echo "{\\"deployments\\": [{\\"processes\\": [{\\"name\\": \\"decode-0\\", \\"pid\\": $(cat "$PRETENDED/pid")}]}]}" ;;
down) kill -9 "$(cat "$PRETENDED/pid")" ;;
bench) cat "$PRETENDED/figures" >"${@: -1}"; exit "$(cat "$PRETENDED/code")" ;;
esac
"""
PYTHON = f"""#!/bin/bash
[ "$1" != deploy/ask.py ] || {{ printf 'Paris %.0s' {{1..30}}; exit; }}
exec {sys.executable} "$@"
"""


def demonstrate(tmp_path: Path, figures: str, code: int) -> subprocess.CompletedProcess[str]:
    for name, text in (("splitserve", SPLITSERVE), ("python", PYTHON)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    (tmp_path / "figures").write_text(figures)
    (tmp_path / "code").write_text(str(code))
    env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "PRETENDED": str(tmp_path), "PORT": "1"}
    return subprocess.run(
        [str(DEMO)],
        check=False,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=20,
    )


def figures(*shapes: tuple[int, int]) -> str:
    rows = ", ".join(f'{{"num": {num}, "num_failed": {failed}}}' for num, failed in shapes)
    return f'{{"results": [{rows}]}}'


def test_goes_on_when_some_requests_of_the_bench_fail(tmp_path: Path) -> None:
    done = demonstrate(tmp_path, figures((3, 0), (8, 1), (16, 4)), code=1)
    assert done.returncode == 0, done.stdout
    assert "5 of 27 requests failed" in done.stdout
    assert "load " in done.stdout
    assert "== 5." in done.stdout
    assert "no shared memory" in done.stdout


@pytest.mark.parametrize(("shapes", "code"), [(figures((3, 3)), 1), ("", 1), (figures((3, 0)), 2)])
def test_ends_when_the_bench_measured_nothing(tmp_path: Path, shapes: str, code: int) -> None:
    done = demonstrate(tmp_path, shapes, code)
    assert done.returncode == code, done.stdout
    assert "== 5." not in done.stdout
    assert "ended early" in done.stdout
