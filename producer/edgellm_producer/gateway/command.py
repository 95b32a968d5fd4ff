"""`edgellm-producer gateway`: serve the HTTP front until told to stop."""

from __future__ import annotations

import argparse
import os
import socket
import sys
from errno import EINVAL
from pathlib import Path

from edgellm_producer.client import Producer
from edgellm_producer.gateway.access import AccessFileError, ApiKeys
from edgellm_producer.shell import explained, seconds


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
    parser.add_argument(
        "--timeout-s", type=seconds, metavar="N", default=600.0, help="per request (default %(default)s)"
    )


async def run_gateway(producer: Producer, args: argparse.Namespace) -> int:
    """Exit code 2 when the extra is not installed, the key file is wrong or the address cannot be listened on."""
    try:
        import uvicorn  # noqa: PLC0415 - an optional extra

        from edgellm_producer.gateway.app import Gateway, GatewayOptions  # noqa: PLC0415
    except ImportError as error:
        sys.stderr.write(f"gateway: {error}; install edgellm-worker[gateway]\n")
        return 2
    try:
        keys = ApiKeys.read(Path(args.api_keys)) if args.api_keys else ApiKeys({})
        listener = _listener(args.host, args.port)
    except (AccessFileError, OSError) as error:
        sys.stderr.write(f"gateway: {explained(error)}\n")
        return 2
    gateway = Gateway(producer, GatewayOptions(tuple(args.served_model_name), keys, args.timeout_s))
    with listener:
        host = f"[{args.host}]" if ":" in args.host else args.host
        sys.stderr.write(f"gateway: http://{host}:{listener.getsockname()[1]}/v1\n")
        await uvicorn.Server(uvicorn.Config(gateway.application(), log_level="warning")).serve(sockets=[listener])
    return 0


def _listener(host: str, port: int) -> socket.socket:
    """Raises `OSError` that names the address. Opened here: the HTTP server would end the program with its own code."""
    if not 0 <= port <= 65535:
        raise OSError(EINVAL, "a port is a number from 0 to 65535", f"--port {port}")
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        words = error.strerror if isinstance(error, socket.gaierror) else os.strerror(error.errno or EINVAL)
        raise OSError(error.errno, words, f"{host}:{port}") from error
