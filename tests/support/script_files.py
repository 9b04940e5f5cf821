"""Scripts of the checkout that belong to no package, imported from their files."""

from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[2]


def script(path: str) -> ModuleType:
    """The file at `path` as a module of its own, new at each call."""
    spec = spec_from_file_location(Path(path).stem, ROOT / path)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
