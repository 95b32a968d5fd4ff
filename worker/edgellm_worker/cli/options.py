"""Flags made from the settings: one group per part, defaults and variables in the help."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from typing import Any, Final

from pydantic import SecretStr
from pydantic.fields import FieldInfo

from edgellm_worker.config import CONFIG_FIELD, SECRETS, Settings, flag_name, option_extra, variable_name

OWN_DEFAULT: Final = "default:"
ENGINE_FIELDS: Final = (
    "engine",
    "cache_dir",
    "rewrite_mtp",
    "correct_draft_feedback",
    "accept_fp16_kv",
    "quantization",
    "kv_cache_dtype",
    "max_input_len",
    "max_kv_cache_capacity",
)
"""Settings of an engine without its batch size and its drafts."""


def add_settings(parser: argparse.ArgumentParser, fields: Iterable[str] | None = None) -> None:
    """Flags for these fields of `Settings` (all of them by default) and --config. None has a default of its own: what
    is not given is absent, so that the environment and the file can say it.
    """
    wanted = set(Settings.model_fields if fields is None else fields) - SECRETS
    groups: dict[str, argparse._ArgumentGroup] = {}
    for name, field in Settings.model_fields.items():
        if name not in wanted:
            continue
        extra = option_extra(field)
        group = groups.get(extra["group"])
        if group is None:
            group = groups[extra["group"]] = parser.add_argument_group(extra["group"])
        _add_flag(group, name, field, extra["metavar"])
    parser.add_argument(
        flag_name(CONFIG_FIELD),
        metavar="FILE",
        default=argparse.SUPPRESS,
        help=f"TOML file with the same keys; flags and variables win over it ({variable_name(CONFIG_FIELD)})",
    )


def _add_flag(group: argparse._ArgumentGroup, name: str, field: FieldInfo, metavar: str) -> None:
    kind: dict[str, Any] = {"metavar": metavar}
    if field.annotation is bool:
        kind = {"action": argparse.BooleanOptionalAction}
    group.add_argument(
        flag_name(name), dest=name, default=argparse.SUPPRESS, help=_help(name, field).replace("%", "%%"), **kind
    )


def _help(name: str, field: FieldInfo) -> str:
    text = field.description or ""
    default = field.default.get_secret_value() if isinstance(field.default, SecretStr) else field.default
    shown = (
        ""
        if default is None or default in ((), frozenset()) or OWN_DEFAULT in text
        else f"default: {_shown(default)}; "
    )
    return f"{text} ({shown}{variable_name(name)})"


def _shown(default: object) -> str:
    return {True: "on", False: "off"}[default] if isinstance(default, bool) else str(default)


def given_flags(arguments: argparse.Namespace) -> dict[str, Any]:
    """The settings among the parsed arguments, by field name."""
    known = {*Settings.model_fields, CONFIG_FIELD}
    return {name: value for name, value in vars(arguments).items() if name in known}
