"""The vendor engine over its fake runtime, in a child process: ``python edgellm_child.py BUNDLE FD``.

What a prompt says happens inside the native call: "hang" never returns, "leak" keeps 50 MB, "abort" ends the process.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from edgellm_worker.engine.api import Engine
from edgellm_worker.engine.child.messages import Load
from edgellm_worker.engine.child.process import prepare_process, run
from tests.support.edgellm_setup import EOS, count_tokens, open_fake
from tests.support.fake_edgellm import Behaviour, Script

HOARD: list[bytes] = []


def script_of(text: str) -> Script:
    if threading.current_thread().name == "edgellm-call":
        match text.split(maxsplit=1)[0]:
            case "hang":
                threading.Event().wait()
            case "leak":
                HOARD.append(b"x" * 50_000_000)
            case "abort":
                os.abort()
    return Script([[10], [11, 12], [EOS]])


def load(message: Load) -> Engine:
    return open_fake(Path(sys.argv[1]), Behaviour(script_of, count_tokens))


if __name__ == "__main__":
    prepare_process()
    sys.exit(run(socket.socket(fileno=int(sys.argv[-1])), load))
