"""Budgets and rules that a reader would otherwise have to watch for."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from package import PACKAGE, ROOT, sources, tree

MOST_FILE_LINES = 450
MOST_FUNCTION_LINES = 60
MOST_PARAMETERS = 8
MOST_KERNEL_LINES = 150  # a kernel is one function by nature, and takes each pointer and stride

FORBIDDEN_WORDS = {
    "manager",
    "handler",
    "helper",
    "helpers",
    "util",
    "utils",
    "info",
    "data",
    "block",
    "mixin",
}
"""docs/architecture.md section 5. `worker` is not here: it is what routers call a server."""

GIVEN_NAMES = {"data_received", "server_info", "get_server_info", "model_info", "get_model_info"}
"""asyncio.Protocol's, and the paths of SGLang's HTTP interface."""

UNFINISHED = re.compile(r"\b(TODO|FIXME|XXX)\b|raise NotImplementedError|\b[Nn]ot (yet )?implemented\b")

Function = ast.FunctionDef | ast.AsyncFunctionDef


def functions() -> Iterator[tuple[Path, Function]]:
    for path in sources():
        for node in ast.walk(tree(path)):
            if isinstance(node, Function):
                yield path, node


def is_kernel(f: Function) -> bool:
    return any(
        word in ast.unparse(d) for d in f.decorator_list for word in ("triton", "compiled", "intrinsic")
    )


def where(path: Path, node: Function | ast.ClassDef) -> str:
    return f"{path.relative_to(ROOT)}:{node.lineno} {node.name}"


def test_files_are_short():
    lengths = {str(p.relative_to(ROOT)): len(p.read_text().splitlines()) for p in sources()}
    assert {p: n for p, n in lengths.items() if n > MOST_FILE_LINES} == {}


def test_functions_are_short():
    over = {
        where(p, f): lines
        for p, f in functions()
        if (lines := (f.end_lineno or 0) - f.lineno + 1)
        > (MOST_KERNEL_LINES if is_kernel(f) else MOST_FUNCTION_LINES)
    }
    assert over == {}


def test_functions_have_few_parameters():
    def count(f: Function) -> int:
        names = [a.arg for a in [*f.args.posonlyargs, *f.args.args, *f.args.kwonlyargs]]
        return len([n for n in names if n not in ("self", "cls")])

    counts = {where(p, f): count(f) for p, f in functions() if not is_kernel(f)}
    assert {f: n for f, n in counts.items() if n > MOST_PARAMETERS} == {}


def test_every_module_says_what_it_is():
    assert [str(p) for p in sources() if p.stat().st_size and not ast.get_docstring(tree(p))] == []


def words_of(name: str) -> set[str]:
    """'HTTPServerInfo' and 'http_server_info' are {http, server, info}."""
    return {w.lower() for w in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)}


def test_names_say_what_things_are():
    named = [
        (where(p, n), n.name) for p in sources() for n in ast.walk(tree(p)) if isinstance(n, ast.ClassDef)
    ]
    named += [(where(p, f), f.name) for p, f in functions()]
    named += [
        (str(p.relative_to(ROOT)), part)
        for p in sources()
        for part in p.relative_to(PACKAGE).with_suffix("").parts
    ]
    assert [
        at for at, name in named if name.strip("_") not in GIVEN_NAMES and words_of(name) & FORBIDDEN_WORDS
    ] == []


def test_nothing_is_unfinished():
    found = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in sources()
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if UNFINISHED.search(line)
    ]
    assert found == []


def test_no_error_is_swallowed():
    """`except Exception` must raise again, or say in a comment on its line why everything ends here."""
    found = []
    for path in sources():
        lines = path.read_text().splitlines()
        for node in ast.walk(tree(path)):
            if not isinstance(node, ast.ExceptHandler):
                continue
            broad = node.type is None or (
                isinstance(node.type, ast.Name) and node.type.id in ("Exception", "BaseException")
            )
            raises = any(isinstance(n, ast.Raise) for n in ast.walk(node))
            if broad and not raises and "#" not in lines[node.lineno - 1]:
                found.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert found == []


DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
PATHS = re.compile(r"(?<![\w/.-])((?:splitserve|deploy|docs|tests|benchmarks|scripts)/[\w./-]*\w(?:/|\.\w+))")


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda p: p.name)
def test_documents_mention_only_files_that_exist(document: Path):
    text = document.read_text()
    mentioned = {m.group(1) for m in PATHS.finditer(text)}
    links = {m.group(1) for m in re.finditer(r"\]\((?!https?:|#)([^)#\s]+)", text)}
    missing = sorted(m for m in mentioned if not (ROOT / m).exists())
    missing += sorted(link for link in links if not (document.parent / link).exists())
    assert missing == []
