"""A master with a replica under Sentinel, and a cluster of three nodes, as real processes."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Self

import redis
from redis.crc import key_slot

from tests.support.redis_server import RedisServer, free_port, program_of, wait_until

NUM_SLOTS = 16384
SERVICE = "main"


class Sentinel:
    """One sentinel whose word is enough, and who loses patience after 300 ms."""

    def __init__(self, folder: Path, version: str, master_port: int, password: str | None = None) -> None:
        self.port = free_port()
        config = folder / f"sentinel-{self.port}.conf"
        lines = [
            f"port {self.port}",
            "bind 127.0.0.1",
            f"dir {folder}",
            f"sentinel monitor {SERVICE} 127.0.0.1 {master_port} 1",
            f"sentinel down-after-milliseconds {SERVICE} 300",
            f"sentinel failover-timeout {SERVICE} 3000",
            *([f"requirepass {password}"] if password else []),
        ]
        config.write_text("\n".join(lines) + "\n")
        program = program_of(version)
        assert program is not None
        self._process = subprocess.Popen(
            [program, str(config), "--sentinel"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        self._client = redis.Redis(port=self.port, password=password, decode_responses=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()
        self._process.kill()
        self._process.wait()

    def knows_a_replica(self) -> bool:
        try:
            return bool(self._client.execute_command("SENTINEL", "REPLICAS", SERVICE))
        except redis.RedisError:
            return False

    def master_port(self) -> int:
        return int(self._client.execute_command("SENTINEL", "GET-MASTER-ADDR-BY-NAME", SERVICE)[1])

    def wait_for_replica(self) -> None:
        wait_until(self.knows_a_replica, "the sentinel knows the replica")


def replicated(start: Callable[..., RedisServer], version: str) -> tuple[RedisServer, RedisServer]:
    """A master and its replica, in step."""
    master, replica = (start(version, port=free_port(), settings={"repl-diskless-sync-delay": "0"}) for _ in range(2))
    with replica.client() as client:
        client.replicaof("127.0.0.1", str(master.port))
        wait_until(lambda: client.info("replication")["master_link_status"] == "up", "replica in step")
    return master, replica


class Cluster:
    """Three masters; the slots are dealt out in equal parts."""

    def __init__(self, start: Callable[..., RedisServer], version: str) -> None:
        settings = {"cluster-enabled": "yes", "cluster-node-timeout": "1000"}
        self.nodes = [
            start(version, port=free_port(), settings={**settings, "cluster-port": str(free_port())}) for _ in range(3)
        ]
        self.clients = [node.client() for node in self.nodes]
        self.ids = [str(client.execute_command("CLUSTER", "MYID")) for client in self.clients]
        for number, client in enumerate(self.clients):
            client.execute_command("CLUSTER", "SET-CONFIG-EPOCH", number + 1)
            first, last = number * NUM_SLOTS // 3, (number + 1) * NUM_SLOTS // 3 - 1
            client.execute_command("CLUSTER", "ADDSLOTSRANGE", first, last)
        for node in self.nodes[1:]:
            bus = node._settings["cluster-port"]
            self.clients[0].execute_command("CLUSTER", "MEET", "127.0.0.1", node.port, bus)
        wait_until(self._is_whole, "the cluster is whole")

    def _is_whole(self) -> bool:
        states = [str(client.execute_command("CLUSTER", "INFO")) for client in self.clients]
        known = [client.execute_command("CLUSTER", "SLOTS") for client in self.clients]
        return all("cluster_state:ok" in state for state in states) and all(len(slots) == 3 for slots in known)

    @property
    def url(self) -> str:
        return "redis+cluster://" + ",".join(f"127.0.0.1:{node.port}" for node in self.nodes)

    def owner_of(self, key: str) -> int:
        """The number of the node that has the key's slot now."""
        slot = key_slot(key.encode())
        for first, last, node, *_ in self.clients[0].execute_command("CLUSTER", "SLOTS"):
            if first <= slot <= last:
                return self.ids.index(node[2])
        raise AssertionError(f"slot {slot} is nobody's")

    def move(self, key: str, to: int) -> None:
        """The key's slot with all its keys, as `redis-cli --cluster reshard` does it."""
        slot, source = key_slot(key.encode()), self.owner_of(key)
        self.clients[to].execute_command("CLUSTER", "SETSLOT", slot, "IMPORTING", self.ids[source])
        self.clients[source].execute_command("CLUSTER", "SETSLOT", slot, "MIGRATING", self.ids[to])
        while keys := self.clients[source].execute_command("CLUSTER", "GETKEYSINSLOT", slot, 100):
            target = ("127.0.0.1", self.nodes[to].port, "", 0, 5000, "KEYS")
            self.clients[source].execute_command("MIGRATE", *target, *keys)
        for number in (to, source, 3 - to - source):
            self.clients[number].execute_command("CLUSTER", "SETSLOT", slot, "NODE", self.ids[to])

    def close(self) -> None:
        for client in self.clients:
            client.close()
