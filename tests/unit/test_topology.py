"""URLs, and the dialogues that find the server in charge."""

from __future__ import annotations

import pytest
from redis.exceptions import ConnectionError as RedisConnectionError

from edgellm_producer.topology import Kind, Question, Target, slot_of

SENTINELS = "rediss+sentinel://user:pa%40ss@s1,s2:1234/main/3?ssl_ca_certs=ca.pem&sentinel_password=other"


def ask(url: str, replies: dict[tuple[str, str], object], slot: int = 5) -> tuple[str, list[Question]]:
    """Run the dialogue against servers that reply by (host:port, first word); all others cannot be reached."""
    dialogue, asked = Target.parse(url).dialogue(slot), []
    reply = None
    while True:
        try:
            question = dialogue.send(reply)
        except StopIteration as end:
            return end.value, asked
        asked.append(question)
        address = question.url.partition("://")[2].rpartition("@")[2].partition("/")[0].partition("?")[0]
        reply = replies.get((address, question.words[0]), ConnectionRefusedError(f"{address} refused"))


@pytest.mark.parametrize(
    ("url", "kind", "database"),
    [
        ("redis://localhost", Kind.SINGLE, 0),
        ("rediss://u:p@h:1/4?ssl_ca_certs=x", Kind.SINGLE, 4),
        ("unix:///run/redis.sock?db=2", Kind.SINGLE, 2),
        (SENTINELS, Kind.SENTINEL, 3),
        ("redis+sentinel://s/main?db=7", Kind.SENTINEL, 7),
        ("rediss+cluster://a,b:7001", Kind.CLUSTER, 0),
    ],
)
def test_urls(url, kind, database):
    target = Target.parse(url)
    assert (target.kind, target.database) == (kind, database)


NO_URLS = [
    *("foo://h", "localhost:6379", "", "redis+what://h", "unix+cluster:///x", "redis://h/?db=x"),
    *("redis+sentinel://s", "redis+sentinel:///main", "redis+sentinel://s/main/x", "redis+sentinel://s/main?db=x"),
    *("redis+cluster://", "redis+cluster://h/1", "redis+cluster://h:port"),
]


@pytest.mark.parametrize("url", NO_URLS)
def test_a_url_of_no_kind_is_refused(url):
    with pytest.raises(ValueError, match=r"\w"):
        Target.parse(url)


def test_a_refused_url_is_not_repeated():
    with pytest.raises(ValueError, match="none of redis") as refused:
        Target.parse("ftp://user:secret@host")
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize(
    "url",
    ["redis://u:secret@h", "redis+cluster://u:secret@h:1", "redis+sentinel://u:secret@h:1/s?sentinel_password=secret"],
    ids=["single", "cluster", "sentinel"],
)
def test_a_target_that_is_printed_keeps_its_password(url):
    assert "secret" not in repr(Target.parse(url))


def test_a_single_server_is_asked_nothing():
    assert ask("redis://h:1/2", {}) == ("redis://h:1/2", [])


def test_the_master_is_who_a_sentinel_names_and_who_says_so_itself():
    replies = {
        ("s2:1234", "SENTINEL"): [b"10.0.0.9", b"6380"],
        ("10.0.0.9:6380", "ROLE"): [b"master", 1, []],
    }
    url, asked = ask(SENTINELS, replies)
    assert url == "rediss://user:pa%40ss@10.0.0.9:6380/3?ssl_ca_certs=ca.pem"
    assert [question.is_for_sentinel for question in asked] == [True, True, False]
    assert asked[0].url == "rediss://:other@s1:26379?ssl_ca_certs=ca.pem"


def test_a_sentinel_that_names_a_replica_is_not_believed():
    replies = {("s:26379", "SENTINEL"): [b"old", b"1"], ("old:1", "ROLE"): [b"slave", b"h", 1, b"x", 1]}
    with pytest.raises(RedisConnectionError, match="old:1 is no master"):
        ask("redis+sentinel://s/main", replies)


def test_no_sentinel_says_anything():
    with pytest.raises(RedisConnectionError, match=r"none of a:26379, b:26379 names .* b knows no service main"):
        ask("redis+sentinel://a,b/main", {("b:26379", "SENTINEL"): None})
    with pytest.raises(RedisConnectionError, match="c:26379 refused"):
        ask("redis+sentinel://c/main", {})


def test_the_node_of_a_cluster_is_the_slots_owner():
    slots = [[0, 99, [b"10.0.0.1", 7001, b"id"], [b"10.0.0.4", 7004, b"id"]], [100, 16383, [b"::1", 7002, b"id", []]]]
    replies = {("b:7001", "CLUSTER"): slots}
    assert ask("redis+cluster://p:w@a,b:7001", replies)[0] == "redis://p:w@10.0.0.1:7001/0"
    assert ask("redis+cluster://a,b:7001", replies, slot=100)[0] == "redis://[::1]:7002/0"


def test_a_node_that_does_not_know_its_own_address_is_where_it_was_asked():
    assert ask("redis+cluster://a:1", {("a:1", "CLUSTER"): [[0, 16383, [b"", 1, b"id"]]]})[0] == "redis://a:1/0"


def test_a_cluster_with_a_hole_names_the_slot():
    with pytest.raises(RedisConnectionError, match="nobody owns slot 5"):
        ask("redis+cluster://a", {("a:6379", "CLUSTER"): []})


def test_every_key_of_a_queue_is_on_one_slot():
    assert {slot_of(f"edgellm:{{q}}:{name}") for name in ("config", "jobs:high", "done:1")} == {slot_of("q")}
