"""`edgellm-producer gateway`: serve the HTTP front until told to stop."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from edgellm_producer.client import Producer
from edgellm_producer.gateway.access import AccessFileError, ApiKeys


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default %(default)s)")
    parser.add_argument("--port", type=int, default=8000, help="(default %(default)s)")
    parser.add_argument(
        "--served-model-name", nargs="+", default=[], metavar="NAME", help="names that /v1/models lists"
    )
    parser.add_argument(
        "--api-keys",
        type=Path,
        default=os.environ.get("EDGELLM_API_KEYS"),
        metavar="FILE",
        help="lines of KEY TENANT; without it everybody may call",
    )
    parser.add_argument("--timeout-s", type=float, default=600.0, help="per request (default %(default)s)")


async def run_gateway(producer: Producer, args: argparse.Namespace) -> int:
    """Exit code 2 when the extra is not installed or the key file is wrong."""
    try:
        import uvicorn  # noqa: PLC0415 - an optional extra

        from edgellm_producer.gateway.app import Gateway, GatewayOptions  # noqa: PLC0415
    except ImportError as error:
        sys.stderr.write(f"gateway: {error}; install edgellm-worker[gateway]\n")
        return 2
    try:
        keys = ApiKeys.read(Path(args.api_keys)) if args.api_keys else ApiKeys({})
    except (AccessFileError, OSError) as error:
        sys.stderr.write(f"gateway: {error}\n")
        return 2
    gateway = Gateway(producer, GatewayOptions(tuple(args.served_model_name), keys, args.timeout_s))
    config = uvicorn.Config(gateway.application(), host=args.host, port=args.port, log_level="warning")
    sys.stderr.write(f"gateway: http://{args.host}:{args.port}/v1\n")
    await uvicorn.Server(config).serve()
    return 0
