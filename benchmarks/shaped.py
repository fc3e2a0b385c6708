"""Network namespaces with slow links between them, made and removed: as if each rank were a machine of its own.

    with shaped(2, mbit=200) as places:
        subprocess.Popen(places[0].command([...]))

Needs root, `ip` and `tc`. Every namespace hangs on a bridge by a link of that rate, a token bucket at each of its ends.
"""

import contextlib
import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Place:
    """One namespace."""

    name: str
    address: str
    interface: str = "eth0"

    def command(self, arguments: list[str]) -> list[str]:
        return ["ip", "netns", "exec", self.name, *arguments]

    def environment(self, rank: int, size: int, master: str, port: int) -> dict[str, str]:
        """What torchrun would tell a rank there."""
        return {
            **os.environ,
            "RANK": str(rank),
            "LOCAL_RANK": "0",
            "WORLD_SIZE": str(size),
            "MASTER_ADDR": master,
            "MASTER_PORT": str(port),
            "GLOO_SOCKET_IFNAME": self.interface,
            "OMP_NUM_THREADS": "1",
            "TORCH_CPP_LOG_LEVEL": "ERROR",  # namespaces have no names to look up
        }


def _run(command: str, *, check: bool = True) -> None:
    subprocess.run(command.split(), check=check, capture_output=not check)


@contextlib.contextmanager
def shaped(count: int, mbit: float, number: int = 0) -> Iterator[list[Place]]:
    """`mbit`: of every link, in megabits a second; `number`: of this network, where there are several at a time."""
    places = [Place(f"ph{number}-{i}", f"10.77.{number}.{i + 1}") for i in range(count)]
    bridge = f"phbridge{number}"
    remove(count, number)
    try:
        _run(f"ip link add {bridge} type bridge")
        _run(f"ip link set {bridge} up")
        for i, place in enumerate(places):
            _run(f"ip netns add {place.name}")
            _run(f"ip link add phlink{number}-{i} type veth peer name {place.interface} netns {place.name}")
            _run(f"ip link set phlink{number}-{i} master {bridge} up")
            inside = f"ip netns exec {place.name}"
            _run(f"{inside} ip addr add {place.address}/24 dev {place.interface}")
            _run(f"{inside} ip link set {place.interface} up")
            _run(f"{inside} ip link set lo up")
            limits = f"tbf rate {mbit:.3f}mbit burst 128kb latency 2s"
            _run(f"{inside} tc qdisc add dev {place.interface} root {limits}")
        yield places
    finally:
        remove(count, number)


def remove(count: int, number: int) -> None:
    """What an earlier run may have left, too."""
    for i in range(count):
        _run(f"ip netns del ph{number}-{i}", check=False)
        _run(f"ip link del phlink{number}-{i}", check=False)
    _run(f"ip link del phbridge{number}", check=False)
