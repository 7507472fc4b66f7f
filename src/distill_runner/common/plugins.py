"""Python code from outside this package: a user's module in the working folder, or an installed module."""

import ast
import hashlib
import inspect
from importlib import import_module
from importlib.metadata import entry_points
from importlib.util import find_spec, resolve_name
from pathlib import Path
from traceback import extract_tb
from typing import Any

from distill_runner.common.errors import UserError, suggestion
from distill_runner.common.process import import_from_working_folder


def load_class(key: str, path: str, base: type) -> Any:
    """Return the class that ``path`` names as ``<module>.<name>``; modules in the working folder are found too.

    Args:
        key: the configuration key, for messages.
        base: the class that the returned class must be a subclass of.
    Raises:
        UserError: the module or class does not exist, the module cannot be imported, or the class is abstract or is no
            subclass of ``base``.
    """
    module_name, _, name = path.rpartition(".")
    import_from_working_folder()
    try:
        module = import_module(module_name)
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and f"{module_name}.".startswith(f"{error.name}."):
            remedy = f"Put {error.name}.py into the current folder, or install the package that contains it."
            raise UserError(key, path, f"there is no module {error.name}", remedy) from error
        frame = extract_tb(error.__traceback__)[-1]
        place = (error.filename, error.lineno) if isinstance(error, SyntaxError) else (frame.filename, frame.lineno)
        problem = f"its module cannot be imported: {type(error).__name__}: {error}".splitlines()[0]
        raise UserError(key, path, problem, f"In {place[0]}, line {place[1]}.") from error
    subclass = getattr(module, name, None)
    if subclass is None:
        classes = [cls for cls in vars(module).values() if isinstance(cls, type) and issubclass(cls, base)]
        names = [cls.__name__ for cls in classes if cls is not base]
        raise UserError(key, path, f"the module {module_name} has no class {name}", suggestion(name, names))
    if not (isinstance(subclass, type) and issubclass(subclass, base)):
        remedy = f"Only subclasses of {base.__module__}.{base.__name__} are accepted."
        raise UserError(key, path, f"is not a {base.__name__}", remedy)
    if inspect.isabstract(subclass):
        missing = ", ".join(sorted(getattr(subclass, "__abstractmethods__", ())))
        raise UserError(key, path, "is abstract", f"Take a subclass that defines {missing}.")
    return subclass


def entry_point(group: str, name: str) -> str | None:
    """Return the path ``<module>.<name>`` that an installed package has registered under ``name``; None if none has."""
    point = next(iter(entry_points(group=group, name=name)), None)
    return f"{point.module}.{point.attr}" if point else None


def source_hash(module_name: str) -> str:
    """Return a hash of the source of a module and of the modules next to it that it imports, directly or indirectly.

    Packages in ``site-packages`` do not count as being next to each other.
    """
    origin, files, queue = _source(module_name.partition(".")[0]), dict[str, bytes](), [module_name]
    while queue:
        name = queue.pop()
        file, package = _source(name), _source(name.partition(".")[0])
        if name in files or not file or not package or not origin:
            continue
        if package != origin and (_folder(package) != _folder(origin) or _folder(package).name == "site-packages"):
            continue
        files[name] = file.read_bytes()
        parent = name if file.name == "__init__.py" else name.rpartition(".")[0]
        for node in ast.walk(ast.parse(files[name])):
            if isinstance(node, ast.Import):
                queue += [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                module = node.module or ""
                base = resolve_name("." * node.level + module, parent) if node.level else module
                queue += [base, *(f"{base}.{alias.name}" for alias in node.names)]
    digest = hashlib.sha256()
    for name in sorted(files):
        digest.update(f"{name}\0".encode() + files[name])
    return digest.hexdigest()[:16]


def _source(module_name: str) -> Path | None:
    try:
        spec = find_spec(module_name)
    except (ImportError, ValueError):
        return None
    return Path(spec.origin) if spec and spec.origin and spec.origin.endswith(".py") else None


def _folder(file: Path) -> Path:
    """Return the folder that contains a top-level module or package."""
    return file.parents[1] if file.name == "__init__.py" else file.parent
