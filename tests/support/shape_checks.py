"""A type checker for `specnb.sampling` that checks the shapes and dtypes of tensors.

Numbers are not checked: the functions refuse bad ones themselves, with errors that tests expect. All tests of a folder
run with it by `pytest tests/sampling --jaxtyping-packages=specnb.sampling,shape_checks.check`, in four times the time.
"""

from beartype import BeartypeConf, FrozenDict, beartype

check = beartype(conf=BeartypeConf(hint_overrides=FrozenDict({float: object, int: object, bool: object})))
