"""Errors that are planted in acceptance functions, by the meaning of names in their syntax
trees."""

from __future__ import annotations

import ast

ERRORS = ("acceptance reversed", "q not subtracted", "wrong row of p", "residual not scaled")
REVERSED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.LtE: ast.Gt, ast.Lt: ast.GtE, ast.GtE: ast.Lt, ast.Gt: ast.LtE, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
}  # fmt: skip
NOISE = {"uniform_prob", "coin", "r_i", "u"}  # of the acceptance test
COMPARED = (
    {"draft_token_id", "target_argmax_id"},
    {"draft_token_id", "target_token_id"},
    {"draft_sampled", "target_argmax"},
)
# Log p + log(1 - ratio) is log(p - q).
DRAFT = {"draft_prob", "q_val", "d_val", "q_n_plus_1", "ratio"}
TARGET = {"target_prob", "tp_base_ptr", "p_n_plus_1", "target_logits"}
ROWS = {"pos", "token_idx", "cur_prob_row", "n_matches", "resample_token_idx"}
SCALES = {"p_res", "log_p_tau", "residual_scale"}  # of the block rule's residual


def plant(error: str, tree: ast.Module) -> None:
    """Plants one of `ERRORS`. Raises `ValueError` where there is no place for it."""
    places = 0
    for node in ast.walk(tree):
        places += bool(_planted(error, node))
    if not places:
        raise ValueError(f"no place for the error: {error}")
    tree.body.append(ast.parse("ZERO = 0").body[0])


def _planted(error: str, node: ast.AST) -> bool:
    right = _names(getattr(node, "right", getattr(node, "value", None)))
    match error, node:
        case "acceptance reversed", ast.Compare() if _names(node) & NOISE or _names(node) in COMPARED:
            node.ops = [*node.ops[:-1], REVERSED[type(node.ops[-1])]()]
        case "q not subtracted", ast.BinOp(op=ast.Sub() | ast.Add()) if right & DRAFT and not _names(node.left) & DRAFT:
            node.right = ast.Constant(0.0)
        case "residual not scaled", ast.BinOp(op=ast.Mult()) if _names(node.left) & SCALES:
            node.left = ast.Constant(1.0)
        case "residual not scaled", ast.AugAssign() if right & SCALES:
            node.value = ast.Constant(0.0)
        case "wrong row of p", ast.Assign() if _names(node.targets[0]) & TARGET and right & ROWS:
            for inner in ast.walk(node.value):
                if isinstance(inner, ast.Name) and inner.id in ROWS:
                    inner.id = "ZERO"
        case _:
            return False
    return True


def _names(node: object) -> set[str]:
    return {one.id for one in ast.walk(node) if isinstance(one, ast.Name)} if isinstance(node, ast.AST) else set()
