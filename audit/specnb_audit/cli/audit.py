"""What `specnb-audit audit` does: reads tokens and models, audits, and prints the report."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from logging import CRITICAL
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.utils import logging

from specnb.distributions import Sampling
from specnb.formats import draft_in
from specnb.loading import folder_of, load_model
from specnb_audit import Engine
from specnb_audit.alternatives import ALTERNATIVES, LEARNED
from specnb_audit.claimed import claimed_sampling
from specnb_audit.cli import INTERRUPTED, UNDECIDED, one_line
from specnb_audit.cli.tokens_out import parsed
from specnb_audit.constraints import Constraints
from specnb_audit.report import Report
from specnb_audit.run import Settings, audit_completions, require_models
from specnb_audit.setting_names import NOT_AUDITED, PENALTIES
from specnb_audit.teacher_forcing import Completion, Models
from specnb_audit.token_file import Seeds, lines_of, read_stream, read_tokens
from specnb_audit.token_file import Sequence as Line

STDIN = Path("-")


def run(options: argparse.Namespace) -> int:
    report = _audited(options)
    print(json.dumps(report.to_dict(), indent=1, allow_nan=False) if options.json else report)
    return 1 if report.rejected else INTERRUPTED if report.interrupted else UNDECIDED if report.undecided else 0


def _audited(options: argparse.Namespace) -> Report:
    """The report. What can be checked without a model is checked before one is loaded."""
    sampling, draft_sampling = _claimed(options), _draft_sampling(options)
    progress = True if sys.stderr is not None and sys.stderr.isatty() else _say
    ignore, ends = tuple(options.ignore), (options.eos, options.max_new_tokens)
    settings = Settings(options.delta, options.seed, *ends, ignore, options.stop, progress)
    settings.auditor()  # raises for bad settings
    if options.limit is not None and options.limit < 1:
        raise ValueError(f"--limit is {options.limit}; give the number of sequences to read, at least 1")
    dtype = None if options.engine_dtype is None else getattr(torch, options.engine_dtype)
    engine = Engine(dtype, options.logit_tolerance, positions=options.numerics_positions)
    torch.empty(1, device=options.device)  # an unknown device is named before a model is loaded
    required = dict(_requirement(words) for words in options.require)
    seeds, seeds_of_control = Seeds(), Seeds()
    sequences = None if options.tokens == STDIN else _independent(read_tokens(options.tokens)[: options.limit], seeds)
    control = [] if options.control is None else _independent(read_tokens(options.control), seeds_of_control)
    target = _loaded(options.target, options)
    draft, suspected = (
        None if name is None else _loaded(name, options) for name in (options.draft, options.alternative)
    )
    models = Models(target, sampling, draft, draft_sampling or sampling, suspected, tuple(options.eos or ()))
    least = options.min_tokens
    try:
        engine = replace(engine, control=_completions(control, models, least))
        if sequences is None:
            report = audit_completions(models, _from_stdin(models, options.limit, seeds, least), settings, engine)
        else:
            given, expected = _completions(sequences, models, least), sum(len(one.tokens) for one in sequences)
            report = audit_completions(models, given, settings, engine, expected)
        of_control = [f"of the control, {check}" for check in seeds_of_control.note()]
        checks = [*seeds.note(), *of_control, *report.checks]
        return replace(report, checks=checks, left_out=seeds.count, required=required)
    except Exception as error:
        raise ValueError(f"cannot audit {options.tokens} against {options.target}: {one_line(error)}") from error


def _claimed(options: argparse.Namespace) -> Sampling:
    names = ("temperature", "top_k", "top_p", "min_p", *PENALTIES, *NOT_AUDITED)
    given = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    given["logit_bias"] = dict(_bias(words) for words in options.logit_bias)
    return claimed_sampling(given, options.filter_order)


def _bias(words: str) -> tuple[str, float]:
    token, _, bias = words.partition(":")
    try:
        return str(int(token)), float(bias)
    except ValueError:
        allowed = "give ID:BIAS, the id of a token and what is added to its logit"
        raise ValueError(f"--logit-bias {words}: {allowed}") from None


def _draft_sampling(options: argparse.Namespace) -> Sampling | None:
    names = ("temperature", "top_k", "top_p", "min_p")
    own = {name: value for name in names if (value := getattr(options, f"draft_{name}")) is not None}
    if not own:
        return None
    if options.draft is None:
        raise ValueError("options of the draft are given and no draft; give --draft, too")
    return claimed_sampling({name: getattr(options, name) for name in names} | own, options.filter_order)


def _completions(sequences: Sequence[Line], models: Models, min_tokens: int) -> list[Completion]:
    """The sequences, checked; `min_tokens` is that of those that declare none. Raises `ValueError`,
    with file and line, for one that a model cannot judge."""
    completions = [
        Completion(one.prompt, one.tokens, one.steps, one.batch, _constraints(one, min_tokens), one.logprobs)
        for one in sequences
    ]
    if completions:
        require_models(models, completions, [one.where for one in sequences])
    return completions


def _constraints(one: Line, min_tokens: int) -> Constraints:
    try:
        return Constraints(one.forced or (), min_tokens if one.min_tokens is None else one.min_tokens, one.allowed)
    except ValueError as error:
        raise ValueError(f"{one.where}: {error}") from None


def _independent(sequences: Sequence[Line], seeds: Seeds) -> list[Line]:
    return [one for one in sequences if not seeds.repeated(one)]


def _from_stdin(models: Models, limit: int | None, seeds: Seeds, min_tokens: int) -> Iterator[Completion | None]:
    if sys.stdin is None:
        raise ValueError("stdin is closed; give a file, or a pipe that writes to this command")
    count = 0
    for sequence in read_stream(lines_of(sys.stdin.fileno())):
        if sequence is None or not seeds.repeated(sequence):
            yield None if sequence is None else _completions([sequence], models, min_tokens)[0]
        count += sequence is not None
        if count == limit:
            return


def _say(line: str) -> None:
    print(f"specnb-audit: {line}", file=sys.stderr, flush=True)


def _requirement(words: str) -> tuple[str, float]:
    kind, _, size = words.rpartition(":")
    try:
        distance = float(size)
    except ValueError:
        distance = 0.0
    kinds = [name for name in ("impossible", *ALTERNATIVES) if name not in LEARNED]
    if kind not in kinds or not 0 < distance <= 1:
        listed = ", ".join(kinds)
        raise ValueError(f"--require {words}: give KIND:TV, a total variation up to 1 for one of the kinds {listed}")
    return kind, distance


def _loaded(name: str, options: argparse.Namespace) -> PreTrainedModel:
    """The model; an error names it."""
    _require_model(name)
    verbosity = logging.get_verbosity()
    logging.set_verbosity(CRITICAL)  # a failure is reported below, in one line
    try:
        folder = folder_of(name)
        if (found := draft_in(folder)) is not None:
            raise ValueError(
                f"it is {found}, and the audit reads only models: leave --draft out, and no bets on mistakes with the "
                "draft are made; specnb-audit explain-acceptance reads such a draft"
            )
        return load_model(folder, options.device, getattr(torch, options.dtype))
    except Exception as error:
        raise ValueError(f"cannot load the model {name}: {one_line(error)}") from error
    finally:
        logging.set_verbosity(verbosity)


def _require_model(name: str) -> None:
    """Raises `ValueError` for a folder that holds no model by itself."""
    folder = Path(name)
    if folder.is_dir():
        if (folder / "adapter_config.json").is_file():
            raise ValueError(f"{folder} holds an adapter (LoRA); merge it into its model, and give the folder of that")
        if not (folder / "config.json").is_file():
            raise ValueError(f"{folder} has no config.json; give the folder that holds it and the weights")
        _require_no_int8(name, parsed((folder / "config.json").read_bytes()) or {})


def _require_no_int8(name: str, config: dict[str, Any]) -> None:
    """Raises `ValueError` for weights of 8-bit integers, as bitsandbytes, GPTQ and compressed-tensors
    name them."""
    quantised = config.get("quantization_config") or {}
    groups = (quantised.get("config_groups") or {}).values()
    weights = [one.get("weights") or {} for one in groups if isinstance(one, dict)]
    whole = any(one.get("num_bits") == 8 and one.get("type") == "int" for one in weights)
    if whole or quantised.get("bits") == 8 or quantised.get("load_in_8bit"):
        raise ValueError(
            f"{name} has int8 weights ({quantised.get('quant_method', 'unknown')}), which depend on the library that "
            "multiplies them; give the model that they were made from as target, and sequences of the same engine "
            "without speculation as --control"
        )
