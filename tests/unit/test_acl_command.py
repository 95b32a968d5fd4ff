"""`edgellm-worker acl` prints what fits the address it is given, and no secret."""

from __future__ import annotations

import pytest

from edgellm_worker.cli.main import main

CASES = [
    ("redis://h", set()),
    ("rediss://user:secret@h/3", {"+select"}),
    ("redis+sentinel://:secret@h/main", {"+role"}),
    ("redis+sentinel://h/main/2", {"+role", "+select"}),
    ("redis+cluster://h", {"+cluster|slots"}),
]


@pytest.mark.parametrize(("url", "extra"), CASES)
@pytest.mark.parametrize("flags", [(), ("--commands",)])
def test_rights_follow_the_topology(url, extra, flags, capsys):
    assert main(["acl", "--redis-url", url, "--queue", "q", *flags], {}) == 0
    text = capsys.readouterr().out
    assert "secret" not in text
    for line, user in zip(text.splitlines(), ("edgellm-worker-q", "edgellm-producer-q"), strict=True):
        words = line.split()
        assert words[:2] == (["ACL", "SETUSER"] if flags else ["user", user])
        assert user in words
        assert ("reset" in words) == bool(flags)
        assert {"~edgellm:{q}:*", "&edgellm:{q}:*", "resetchannels", "on"} < set(words)
        assert {"+select", "+role", "+cluster|slots"} & set(words) == extra
        assert not {word for word in words if word.startswith("+@") or word in {"~*", "&*", "allkeys", "nopass"}}


def test_the_users_of_the_default_queue_have_short_names(capsys):
    assert main(["acl"], {}) == 0
    assert [line.split()[1] for line in capsys.readouterr().out.splitlines()] == ["edgellm-worker", "edgellm-producer"]
