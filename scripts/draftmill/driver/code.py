"""Which local files a script runs, and what their code hashes to.

A comment, a docstring, a formatting change or a new time stamp changes no fingerprint; a changed
statement in the script or in any local module that it imports, directly or not, does.
"""

import ast
import hashlib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

SCRIPTS = Path(__file__).resolve().parents[2]


def local_files(name: str) -> Iterator[str]:
    """The files under scripts/ that importing the dotted `name` runs: packages first."""
    parts = name.split(".")
    for depth in range(1, len(parts) + 1):
        stem = Path(*parts[:depth])
        for candidate in (stem / "__init__.py", stem.with_suffix(".py")):
            if (SCRIPTS / candidate).is_file():
                yield candidate.as_posix()


def imported_names(tree: ast.AST, package: str) -> Iterator[str]:
    """Every dotted name that a module's import statements could load, wherever they stand."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: len(package.split(".")) - node.level + 1]
            base = ".".join([*(parents if node.level else []), *filter(None, [node.module])])
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)


@cache
def closure(script: str, *modules: str) -> tuple[str, ...]:
    """The script (a path under scripts/) and every local file it imports, sorted.

    modules: dotted names that it imports by name, as the configuration says (see algorithms.py).
    """
    chosen = [file for module in modules for file in local_files(module)]
    seen, waiting = set(), [script, *chosen]
    while waiting:
        file = waiting.pop()
        if file in seen:
            continue
        seen.add(file)
        package = ".".join(Path(file).parent.parts)
        for name in imported_names(ast.parse((SCRIPTS / file).read_bytes()), package):
            waiting.extend(local_files(name))
    return tuple(sorted(seen))


def tree_text(node: object) -> str:
    """A syntax tree as text: docstrings, positions and empty fields left out.

    Unlike ast.dump, whose output changes between Python versions, it drops every empty field.
    """
    if isinstance(node, ast.AST):
        documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
        if isinstance(node, documented) and ast.get_docstring(node, clean=False) is not None:
            node.body = node.body[1:]
        fields = [(name, getattr(node, name, None)) for name in node._fields]
        inner = ",".join(f"{n}={tree_text(v)}" for n, v in fields if v is not None and v != [])
        return f"{type(node).__name__}({inner})"
    if isinstance(node, list):
        return "[" + ",".join(map(tree_text, node)) + "]"
    return f"{type(node).__name__}:{node!r}"


@cache
def file_code(file: str) -> str:
    return hashlib.sha256(tree_text(ast.parse((SCRIPTS / file).read_bytes())).encode()).hexdigest()


@cache
def code_of(script: str, *modules: str) -> str:
    """The code fingerprint of a script: 16 hexadecimal digits over its closure's syntax trees."""
    lines = [f"{file}\0{file_code(file)}\n" for file in closure(script, *modules)]
    return hashlib.sha256("".join(lines).encode()).hexdigest()[:16]


def raw_digests(script: str) -> dict[str, str]:
    """The SHA-256 of the bytes of each file of the closure: what a job compares before it starts."""
    return {f: hashlib.sha256((SCRIPTS / f).read_bytes()).hexdigest() for f in closure(script)}
