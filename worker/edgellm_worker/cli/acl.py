"""`edgellm-worker acl`: two users with the least rights, as lines for the server's `aclfile` or as commands.

It asks no server and knows no password: each line holds a placeholder for the SHA-256 of one.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping

from edgellm_producer.keys import Keys
from edgellm_producer.topology import Target
from edgellm_worker.cli.options import add_settings, given_flags
from edgellm_worker.config import load_settings
from edgellm_worker.errors import ExitCode
from edgellm_worker.queue.rights import Rights, Role

FIELDS = ("redis_url", "queue")


def configure(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "print the users that a worker and a producer of this queue need; "
        "replace each SHA256 by `printf %s PASSWORD | sha256sum`"
    )
    add_settings(parser, FIELDS)
    parser.add_argument("--commands", action="store_true", help="as ACL SETUSER commands, not as lines of an aclfile")


def run(arguments: argparse.Namespace, environment: Mapping[str, str]) -> int:
    settings, _ = load_settings(given_flags(arguments), environment, require_model=False)
    target = Target.parse(settings.redis_url.get_secret_value())
    head = "ACL SETUSER" if arguments.commands else "user"
    for role in Role:
        user = f"edgellm-{role}" if settings.queue == Keys().queue else f"edgellm-{role}-{settings.queue}"
        rights = Rights(role, user, settings.queue, target.kind, target.database)
        words = [word for word in rights.words("#SHA256") if arguments.commands or word != "reset"]
        sys.stdout.write(" ".join([head, user, *words]) + "\n")
    return ExitCode.DONE
