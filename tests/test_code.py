"""The code fingerprint: every statement counts, its looks do not, and no import is missed."""

import ast
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from draftmill.driver import code

MODULES = {
    "stage.py": (
        '"""A stage."""\n\nimport shared.direct\nfrom shared import late\n\n\ndef main():\n'
        "    # looks up\n    from lonely import value\n\n    return shared.direct.f() + value\n"
    ),
    "lonely.py": "value = 1\n",
    "unused.py": "value = 1\n",
    "shared/__init__.py": "",
    "shared/direct.py": (
        '"""Direct."""\n\nfrom shared.deep.inner import f as g\n\n\n'
        'def f():\n    """Gives g."""\n    return g()\n'
    ),
    "shared/late.py": "from . import sibling\n",
    "shared/sibling.py": "value = 2\n",
    "shared/cousin.py": "value = 3\n",
    "shared/unused.py": "value = 4\n",
    "shared/deep/__init__.py": "",
    "shared/deep/inner.py": "from ..cousin import value\n\n\ndef f():\n    return value\n",
}
USED = sorted(set(MODULES) - {"unused.py", "shared/unused.py"})


class Tree:
    """A folder of scripts in the place of scripts/."""

    def __init__(self, folder: Path):
        self.folder = folder

    def code(self, script: str = "stage.py") -> str:
        for function in (code.closure, code.file_code, code.code_of):
            function.cache_clear()
        return code.code_of(script)

    def write(self, name: str, text: str) -> None:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


@pytest.fixture
def tree(tmp_path, monkeypatch):
    monkeypatch.setattr(code, "SCRIPTS", tmp_path)
    found = Tree(tmp_path)
    for name, text in MODULES.items():
        found.write(name, text)
    yield found
    monkeypatch.undo()
    found.code("report.py")  # no cache of this tree outlives it


@pytest.fixture
def scripts(repository) -> list[str]:
    return sorted(path.name for path in (repository / "scripts").glob("*.py"))


def test_the_closure_holds_direct_indirect_late_and_relative_imports(tree):
    tree.code()
    assert list(code.closure("stage.py")) == USED


@pytest.mark.parametrize("name", USED)
def test_a_changed_statement_in_any_used_file_changes_the_code(name, tree):
    before = tree.code()
    tree.write(name, MODULES[name] + "added = 1\n")
    assert tree.code() != before


@pytest.mark.parametrize("name", ["unused.py", "shared/unused.py"])
def test_an_unused_file_changes_nothing(name, tree):
    before = tree.code()
    tree.write(name, "value = 'other'\n")
    assert tree.code() == before


def test_a_renamed_module_changes_the_code(tree):
    before = tree.code()
    shutil.move(tree.folder / "lonely.py", tree.folder / "alone.py")
    tree.write("stage.py", MODULES["stage.py"].replace("lonely", "alone"))
    assert tree.code() != before


def test_a_module_that_becomes_a_package_stays_covered(tree):
    tree.code()
    (tree.folder / "lonely.py").unlink()
    tree.write("lonely/__init__.py", "value = 1\n")
    tree.code()
    assert "lonely/__init__.py" in code.closure("stage.py")


def test_comments_docstrings_format_and_time_stamps_change_nothing(tree):
    before = tree.code()
    for name, text in MODULES.items():
        text = text.replace('"""A stage."""', '"""Another\n\ntext."""')
        text = text.replace('    """Gives g."""\n', "").replace('"""Direct."""\n', "")
        tree.write(name, "# a comment\n" + text.replace("    ", "  ").replace(" = ", "=") + "\n\n")
        os.utime(tree.folder / name, (1, 1))
    assert tree.code() == before


def test_every_script_written_anew_from_its_syntax_tree_has_the_same_code(
    tree, scripts, repository
):
    wanted = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(code, "SCRIPTS", repository / "scripts")
        wanted = {script: tree.code(script) for script in scripts}
    for path in (repository / "scripts").rglob("*.py"):
        name = path.relative_to(repository / "scripts").as_posix()
        tree.write(name, ast.unparse(ast.parse(path.read_bytes())))
    for script in scripts:
        assert tree.code(script) == wanted[script], script


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("return", "return None"),
        ("f(*a)", "f(**a)"),
        ("f(None)", "f()"),
        ("f(a=b)", "f(b)"),
        ("{None: a}", "{**a}"),
        ("x = 1", "x = True"),
        ("x = 1", "x = 1.0"),
        ("x = 'a'", "x = b'a'"),
        ("x = []", "x = ()"),
        ("x = ''", "x = f''"),
        ("x = f'{a}'", "x = f'{a!r}'"),
        ("x: int", "x: int = None"),
        ("def f(*, a): pass", "def f(*, a=None): pass"),
        ("def f(a, /): pass", "def f(a): pass"),
        ("def f(): pass", "async def f(): pass"),
        ("if a: b\nelse: c", "if a: b\nc"),
        ("from a import b", "from a import b as c"),
        ("from . import b", "from .. import b"),
        ("a < b < c", "a < (b < c)"),
        ("'text'\nf()", "f()\n'text'"),
    ],
)
def test_another_meaning_is_another_code(first, second):
    def text(statements: str) -> str:
        body = "\n  ".join(["async def outer():", "pass", *statements.splitlines()])
        return code.tree_text(ast.parse(body))

    assert text(first) != text(second)


def test_every_deleted_or_doubled_statement_changes_the_code(repository):
    source = (repository / "scripts" / "draftmill" / "acceptance.py").read_text(encoding="utf-8")
    before = code.tree_text(ast.parse(source))

    def blocks(tree: ast.AST) -> list[list[ast.stmt]]:
        return [n.body for n in ast.walk(tree) if isinstance(getattr(n, "body", None), list)]

    checked = 0
    for number, statements in enumerate(blocks(ast.parse(source))):
        for index, statement in enumerate(statements):
            if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
                continue  # a docstring
            for copies in (0, 2):
                tree = ast.parse(source)
                body = blocks(tree)[number]
                body[index : index + 1] = [body[index]] * copies
                assert code.tree_text(tree) != before, ast.unparse(statement)
                checked += 1
    assert checked > 80


def test_running_a_script_loads_no_local_file_outside_its_closure(repository, scripts):
    def is_local(name: str) -> bool:
        return name.split(".")[0] == "draftmill"

    before = {name: module for name, module in sys.modules.items() if is_local(name)}
    root, counts = repository / "scripts", []
    try:
        for script in scripts:
            for name in filter(is_local, list(sys.modules)):
                del sys.modules[name]
            runpy.run_path(str(root / script), run_name="not_main")
            files = [module.__file__ for name, module in sys.modules.items() if is_local(name)]
            loaded = {Path(file).relative_to(root).as_posix() for file in files}
            assert loaded <= set(code.closure(script)), script
            counts.append(len(loaded))
    finally:
        for name in filter(is_local, list(sys.modules)):
            del sys.modules[name]
        sys.modules.update(before)
    assert max(counts) > 10


def test_raw_digests_name_every_file_of_the_closure(tree):
    tree.code()
    before = code.raw_digests("stage.py")
    assert sorted(before) == USED
    tree.write("lonely.py", MODULES["lonely.py"] + "# a comment\n")
    after = code.raw_digests("stage.py")
    assert [name for name in before if before[name] != after[name]] == ["lonely.py"]


def runnable(version: str) -> str | None:
    """A Python of this version that really starts; a pyenv shim may not."""
    found = shutil.which(f"python{version}")
    pyenv = sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))
    for python in [found, *map(str, pyenv)]:
        if python and subprocess.run([python, "-c", ""], capture_output=True).returncode == 0:
            return python
    return None


@pytest.mark.parametrize("version", ["3.12", "3.13"])
def test_the_code_is_the_same_under_another_python(version, repository, scripts):
    python = runnable(version)
    if python is None:
        pytest.skip(f"no Python {version} starts on this machine")
    program = (
        "import json, sys; sys.path.insert(0, sys.argv[1]); from draftmill.driver.code import code_of\n"
        "print(json.dumps({script: code_of(script) for script in sys.argv[2:]}))"
    )
    command = [python, "-B", "-c", program, str(repository / "scripts"), *scripts]
    found = subprocess.run(command, capture_output=True, text=True, check=True)
    assert json.loads(found.stdout) == {script: code.code_of(script) for script in scripts}


def test_no_shell_of_a_rule_made_in_a_loop_reads_the_loops_variable(repository):
    """Snakemake evaluates a shell when its job runs, and the variable is the loop's last value then."""
    found = []
    for path in (repository / "rules").glob("*.smk"):
        loops = re.findall(r"^for (.+) in .*:\n((?:\n| .*\n)+)", path.read_text(), re.M)
        for names, body in loops:
            shell = body.partition("shell:")[2]
            found.append(bool(shell))
            for name in names.split(", "):
                assert not re.search(rf"(?<!\{{)\{{{name}\b", shell), f"{path.name}: {name}"
    assert any(found)
