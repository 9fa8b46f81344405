"""`minipic serve MODEL [vLLM options]`: vLLM's own server, with the plugin on."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import sys
from collections.abc import Sequence
from typing import Any, get_args

from minipic_backend.choices import choose_layout
from minipic_backend.cli.layout_options import add_layout_options, layout_defaults
from minipic_backend.config import KeyEncoding
from minipic_backend.engines.launch import engine_arguments, without_vllm

__all__ = ["plugin_names", "serve"]

_PLUGIN = "minipic"
_PLUGIN_GROUPS = (
    "vllm.general_plugins",
    "vllm.io_processor_plugins",
    "vllm.platform_plugins",
    "vllm.stat_logger_plugins",
)
_ENDPOINT_GROUP = "vllm.endpoint_plugins"

_EPILOG = """All other options are vLLM's, as for `vllm serve`: --port, --api-key,
--max-model-len, --served-model-name, … `minipic serve MODEL --help=all` lists them."""


def serve(arguments: Sequence[str]) -> int:
    """Runs the server until it is told to stop.

    Raises:
        MiniPICError: no vLLM, no such model, or options that do not go together.
    """
    ours, rest = _parser().parse_known_args(list(arguments))
    layout = layout_defaults(ours)
    choose_layout(layout, {})
    os.environ["VLLM_PLUGINS"] = ",".join(plugin_names(os.environ.get("VLLM_PLUGINS")))
    try:
        from vllm.entrypoints.cli.serve import ServeSubcommand
        from vllm.entrypoints.serve.utils.api_utils import cli_env_setup
        from vllm.logger import configure_logging_from_args
        from vllm.utils.argparse_utils import FlexibleArgumentParser
    except ImportError as error:
        raise without_vllm(error) from error

    cli_env_setup()
    command = ServeSubcommand()
    parser = FlexibleArgumentParser(prog="minipic", description="vLLM's server, with spans.")
    command.subparser_init(parser.add_subparsers(required=True, dest="subparser"))
    # vLLM's parser reads --config and the like from the command line itself.
    if any(one in ("-h", "--help") for one in rest):
        _parser().print_help()
        print()
    args = parser.parse_args(["serve", *rest])
    configure_logging_from_args(args)
    _complete(args, ours, layout, no_eager="--no-enforce-eager" in rest)
    command.validate(args)
    command.cmd(args)
    return 0


def plugin_names(chosen: str | None) -> list[str]:
    """What `VLLM_PLUGINS` must name for our routes, and leave all other plugins as they are.

    vLLM loads routes only where that variable names their plugin, and then nothing else.

    Args:
        chosen: its value; None where it is not set.
    """
    if chosen is not None:
        names = [name for name in chosen.split(",") if name]
        return names if _PLUGIN in names else [*names, _PLUGIN]
    entries = importlib.metadata.entry_points()
    names = [entry.name for group in _PLUGIN_GROUPS for entry in entries.select(group=group)]
    opened = {entry.name for entry in entries.select(group=_ENDPOINT_GROUP)} & set(names)
    if others := sorted(opened - {_PLUGIN}):
        print(
            f"minipic serve: the routes of {', '.join(others)} are switched on too, since the "
            "plugin has the same name; set VLLM_PLUGINS to say which plugins you want",
            file=sys.stderr,
        )
    return list(dict.fromkeys([*names, _PLUGIN]))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="minipic serve",
        usage="minipic serve MODEL [options] [vLLM options]",
        description="vLLM's OpenAI-compatible server, with documents reused as spans.",
        epilog=_EPILOG,
        allow_abbrev=False,
        add_help=False,
    )
    parser.add_argument("--key-encoding", choices=get_args(KeyEncoding), default="span_local")
    parser.add_argument(
        "--markers", nargs=3, metavar=("SSEP", "PDEP", "PAD"), help="tokens, instead of those found"
    )
    parser.add_argument("--kv-cache-gib", type=float, metavar="GIB", help="default on a CPU: 2")
    group = parser.add_argument_group("layout of chats with marks that choose nothing themselves")
    add_layout_options(group)
    return parser


def _complete(
    args: Any, ours: argparse.Namespace, layout: dict[str, Any], *, no_eager: bool
) -> None:
    """vLLM's parsed arguments, as the embedded engine has them where they say nothing."""
    from minipic_backend.server.plugin import LAYOUT_ARGUMENT

    name = args.model_tag or args.model
    spans: dict[str, Any] = {"key_encoding": ours.key_encoding}
    if ours.markers is not None:
        spans["markers"] = ours.markers
    given = {"additional_config": args.additional_config}
    if args.kv_cache_memory_bytes is not None:
        given["kv_cache_memory_bytes"] = args.kv_cache_memory_bytes
    if no_eager:
        given["enforce_eager"] = False
    for key, value in engine_arguments(name, spans, ours.kv_cache_gib, given, verbose=True).items():
        setattr(args, key, value)
    if args.model != name and args.served_model_name is None:
        args.served_model_name = [name]
    args.model_tag = None
    # Without it usage says nothing of the cache.
    args.enable_prompt_tokens_details = True
    setattr(args, LAYOUT_ARGUMENT, layout)
