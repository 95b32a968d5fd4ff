"""The command `edgellm-worker`: a table of commands, one file each."""

from edgellm_worker.cli.main import main

__all__ = ["main"]
