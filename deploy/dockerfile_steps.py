"""Run a Dockerfile's steps without Docker, in a copy of a clean root file system.

    sudo debootstrap --variant=minbase --include=python3,python3-venv,ca-certificates bookworm /tmp/base
    sudo python3 deploy/dockerfile_steps.py deploy/Dockerfile.cpu --base /tmp/base --try 'edgellm-worker --help'

It understands what this project's Dockerfiles use: FROM, ARG, WORKDIR, COPY (also --from), RUN, ENV, USER. Every stage
starts from the same base, so it shows that the steps work and that the result runs as its user; it says nothing about
the real base image. Needs root (chroot) and a network for pip.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

PATH: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


@dataclass(slots=True)
class Stage:
    """`root` is the stage's file system on this machine."""

    name: str
    root: Path
    workdir: str = "/"
    user: str = "0"
    env: dict[str, str] = field(default_factory=lambda: {"PATH": PATH})
    args: dict[str, str] = field(default_factory=dict)

    def at(self, path: str) -> Path:
        return self.root / str(Path(self.workdir) / path).lstrip("/")

    def run(self, command: str) -> None:
        keep = {name: value for name, value in os.environ.items() if name.startswith("PIP_")}
        # /proc is mounted in a namespace of its own, so that it is gone with the command.
        outer = (
            f'mount -t proc proc "{self.root}/proc"; exec chroot --userspec={self.user}:{self.user} "{self.root}" "$@"'
        )
        subprocess.run(
            ["unshare", "--mount", "/bin/sh", "-ec", outer, "sh", "/bin/sh", "-ec", f"cd {self.workdir}\n{command}"],
            env={**keep, **self.args, **self.env},
            check=True,
        )


def instructions(text: str) -> Iterator[tuple[str, str]]:
    """(keyword, rest) with comments left out and continued lines joined."""
    lines = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))
    for line in re.sub(r"\\\n\s*", " ", lines).splitlines():
        if line.strip():
            keyword, _, rest = line.strip().partition(" ")
            yield keyword.upper(), rest.strip()


class Builder:
    def __init__(self, context: Path, base: Path, work: Path, host_files: Sequence[Path]) -> None:
        self.stages: list[Stage] = []
        self._context = context
        self._base = base
        self._work = work
        self._host_files = host_files
        self._steps = {
            "FROM": self._from,
            "ARG": self._arg,
            "WORKDIR": self._workdir,
            "COPY": self._copy,
            "RUN": self._run,
            "ENV": self._env,
            "USER": self._user,
        }

    def step(self, keyword: str, rest: str) -> None:
        if keyword == "ARG" and not self.stages:
            return  # names the base image, which is given here
        if keyword in self._steps:
            print(f"+ {keyword} {rest}", flush=True)
            self._steps[keyword](rest)

    def _from(self, rest: str) -> None:
        name = rest.split(" AS ")[1] if " AS " in rest else f"stage{len(self.stages)}"
        root = self._work / name
        subprocess.run(["cp", "-a", "--reflink=auto", self._base, root], check=True)
        for path in self._host_files:
            shutil.copy(path, root / path.relative_to("/"))
        (root / "dev/null").unlink(missing_ok=True)
        subprocess.run(["mknod", "-m", "666", root / "dev/null", "c", "1", "3"], check=True)
        self.stages.append(Stage(name, root))

    def _arg(self, rest: str) -> None:
        name, _, value = rest.partition("=")
        self.stages[-1].args[name] = os.environ.get(name, value)

    def _workdir(self, rest: str) -> None:
        self.stages[-1].workdir = rest
        self.stages[-1].at(rest).mkdir(parents=True, exist_ok=True)

    def _copy(self, rest: str) -> None:
        stage = self.stages[-1]
        words = rest.split()
        source_root = self._context
        if words[0].startswith("--from="):
            source = next(s for s in self.stages if s.name == words.pop(0).removeprefix("--from="))
            source_root = source.root
        *sources, target = words
        for name in sources:
            path = source_root / name.lstrip("/")
            into = stage.at(target) / path.name if target.endswith("/") else stage.at(target)
            into.parent.mkdir(parents=True, exist_ok=True)
            skip = shutil.ignore_patterns("__pycache__")
            if path.is_dir():
                shutil.copytree(path, into, symlinks=True, dirs_exist_ok=True, ignore=skip)
            else:
                shutil.copy2(path, into)

    def _run(self, rest: str) -> None:
        self.stages[-1].run(rest)

    def _env(self, rest: str) -> None:
        stage = self.stages[-1]
        for word in shlex.split(rest):
            name, _, value = word.partition("=")
            stage.env[name] = value.replace("$PATH", stage.env["PATH"])

    def _user(self, rest: str) -> None:
        self.stages[-1].user = rest


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dockerfile", type=Path)
    parser.add_argument("--base", type=Path, required=True, help="a clean root file system with python3")
    parser.add_argument(
        "--try", dest="tries", action="append", default=[], help="run this as the image's user at the end"
    )
    parser.add_argument("--host-file", type=Path, action="append", default=[Path("/etc/resolv.conf")])
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="dockerfile-") as work:
        # The image's user must reach the files through it.
        Path(work).chmod(0o755)
        builder = Builder(options.dockerfile.resolve().parents[1], options.base, Path(work), options.host_file)
        for keyword, rest in instructions(options.dockerfile.read_text(encoding="utf-8")):
            builder.step(keyword, rest)
        for command in options.tries:
            print(f"$ {command}", flush=True)
            builder.stages[-1].run(command)
    return 0


if __name__ == "__main__":
    sys.exit(main())
