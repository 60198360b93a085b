"""Who may import whom: a file its own level or lower, without cycles; and Horovod in one file alone."""

from __future__ import annotations

import ast
import pathlib

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "hvd8bit"

LEVELS = {
    0: ["datatypes"],
    1: ["encoding", "layout", "modes", "wire", "reference", "native", "speedup", "graphs", "stall", "loopback", "logs"],
    2: ["dither", "ops", "c_api", "counting", "collectives", "selection", "variables", "gathered"],
    3: ["exchange", "activations", "feedback"],
    4: ["compression", "planning", "reduction", "api", "tape", "summaries", "keras", "parallel"],
    5: ["bench", "doctor", "errors", "keras_workload", "plots", "tables", "commands", "cli", "__main__"],
}
"""Level -> files and folders of hvd8bit/. A new one gets a place here, the lowest that its imports allow."""

WITHOUT_TENSORFLOW = ("datatypes", "encoding", "layout", "modes", "wire", "reference", "speedup")

# Names of Horovod's that move no bytes: any file may use them.
CONSTANTS = {
    "Average",
    "Sum",
    "Min",
    "Max",
    "Product",
    "Adasum",
    "Compression",
    "ProcessSet",
    "global_process_set",
}

ALLOWED_OF_HOROVOD = {
    "compression.py": {"Compressor": "to subclass it: `EightBit` is one of Horovod's compressors"},
    "api.py": {
        "allreduce": "the front door: Horovod's own, which calls the compressor it is given",
        "grouped_allreduce": "the same for lists",
        "broadcast": "sets the initial state, exactly; no gradient passes here",
    },
    "keras/callbacks.py": {"rank": "who prints"},
    "keras/elastic.py": {
        "ObjectState": "to subclass it, for hvd.elastic.run",
        "broadcast_object": "what that class shares its values by",
        "rank": "the same class asks for it",
    },
    "keras/keras2.py": {"DistributedOptimizer": "Keras 2 is Horovod's own optimizer, wrapped"},
}
"""File -> what else it may take from Horovod, and why. collectives.py and level 5 may take anything."""


def python_files() -> list[pathlib.Path]:
    return sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")


def module_of(path: pathlib.Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def level_of(module: str) -> int | None:
    return next((level for level, names in LEVELS.items() if module.partition(".")[0] in names), None)


MODULES = {module_of(path) for path in python_files()}


def imported_modules(path: pathlib.Path) -> set[str]:
    """Full names of what a file imports, at any place in it; for `from a import b` both `a` and `a.b`."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}:{node.lineno}: import hvd8bit's modules by their full names"
            names |= {node.module or ""} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def own_imports(path: pathlib.Path) -> set[str]:
    """The files of hvd8bit/ that a file imports, and the __init__ files that Python runs on the way."""
    found = set()
    for name in imported_modules(path):
        if name.startswith("hvd8bit."):
            parts = name.split(".")[1:]
            found |= {".".join(parts[: end + 1]) for end in range(len(parts))} & MODULES
    return found - {module_of(path)}


@pytest.mark.parametrize("path", python_files(), ids=module_of)
def test_a_file_imports_its_own_level_or_lower(path):
    module = module_of(path)
    level = level_of(module)
    assert level is not None, f"hvd8bit/{module}: give it a level in {pathlib.Path(__file__).name}"
    for imported in own_imports(path):
        assert level_of(imported) is not None
        assert level_of(imported) <= level, (
            f"hvd8bit/{module} (level {level}) imports hvd8bit/{imported} (level {level_of(imported)}): "
            "move what it needs down, or pass it in"
        )


def test_no_cycles():
    graph = {module_of(path): own_imports(path) for path in python_files()}
    # Inside a folder, __init__ imports its files; that they lie in it is no import of __init__ by them.
    for module, imports in graph.items():
        imports.discard(module.rpartition(".")[0])
    done: set[str] = set()

    def visit(module, path):
        assert module not in path, f"cycle: {' -> '.join([*path[path.index(module) :], module])}"
        if module not in done:
            for imported in sorted(graph[module]):
                visit(imported, [*path, module])
            done.add(module)

    for module in graph:
        visit(module, [])


@pytest.mark.parametrize("name", WITHOUT_TENSORFLOW)
def test_numeric_code_knows_no_framework(name):
    for path in [p for p in python_files() if module_of(p).partition(".")[0] == name]:
        tops = {module.partition(".")[0] for module in imported_modules(path)}
        assert not tops & {"tensorflow", "keras", "tf_keras", "horovod"}, path


def test_the_package_itself_imports_nothing():
    """Its public names come lazily."""
    assert imported_modules(PACKAGE / "__init__.py") == {"importlib"}


def used_of_horovod(path: pathlib.Path) -> dict[str, int]:
    """Name -> line, of what a file takes from Horovod's modules."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    used, aliases = {}, set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "horovod":
            used.update({alias.name: node.lineno for alias in node.names})
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.partition(".")[0] == "horovod":
                    aliases.add(alias.asname or "horovod")
    with_attribute = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in aliases:
            used[node.attr] = node.lineno
            with_attribute.add(id(node.value))
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id in aliases and id(node) not in with_attribute:
            used["the module as a value"] = node.lineno
    return used


@pytest.mark.parametrize("path", [p for p in python_files() if level_of(module_of(p)) != 5], ids=module_of)
def test_horovod_moves_bytes_in_collectives_alone(path):
    name = path.relative_to(PACKAGE).as_posix()
    if name == "collectives.py":
        return
    allowed = ALLOWED_OF_HOROVOD.get(name, {})
    used = used_of_horovod(path)
    for attribute, line in used.items():
        assert attribute in CONSTANTS or attribute in allowed, (
            f"hvd8bit/{name}:{line} takes {attribute} from Horovod: let hvd8bit/collectives.py do it, "
            f"or state the reason in {pathlib.Path(__file__).name}"
        )
    unused = set(allowed) - set(used)
    assert not unused, f"hvd8bit/{name} takes {unused} from Horovod no more: strike it out here"


def test_every_exception_is_for_a_file():
    assert all((PACKAGE / name).exists() for name in ALLOWED_OF_HOROVOD)


def test_no_two_test_files_share_a_name():
    """They are imported by their bare names, so that the second of a name would be the first."""
    names = [path.stem for path in (ROOT / "tests").rglob("*.py") if path.stem != "conftest"]
    assert sorted(names) == sorted(set(names))
