"""A bad link between network namespaces of this machine: each packet between them is late, and some are lost.

    python lossy_link.py NAME=ADDRESS ... [--client ADDRESS] [--delay 0.02] [--loss 0.01]

Makes a namespace per name, each with a TUN device that has the address, and carries the packets between the
devices itself: kernels without the netem scheduler have no other way. The client's device is in the namespace
that this runs in; to and from it nothing is late or lost. On stdin: "cut" (nothing passes), "mend"; at its
end all is taken away again. Says "ready" when it is, or why it cannot be (and exits with 3).
"""

from __future__ import annotations

import argparse
import fcntl
import heapq
import itertools
import os
import random
import select
import struct
import subprocess
import sys
import time

TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
QUEUE = 20_000
"""Packets on their way at once; more are lost."""


class Impossible(Exception):
    """This machine does not let namespaces be made."""


def run(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Impossible(f"{' '.join(words)}: {done.stderr.strip() or done.returncode}")


def open_tun(name: str) -> int:
    try:
        device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TUN | IFF_NO_PI))
    except OSError as error:
        raise Impossible(f"/dev/net/tun: {error.strerror}") from error
    return device


class Network:
    def __init__(self, places: dict[str, str], client: str | None, delay: float, loss: float) -> None:
        self.delay, self.loss = delay, loss
        self.places, self.client = places, client
        self.devices: dict[bytes, int] = {}  # by address
        self.made: list[str] = []
        self.cut = False
        self._random = random.Random(1)
        self.lost = self.passed = 0

    def make(self) -> None:
        for number, (name, address) in enumerate(self.places.items()):
            run("ip", "netns", "add", name)
            self.made.append(name)
            device = f"ll{os.getpid() % 100000}n{number}"
            self.devices[packed(address)] = open_tun(device)
            run("ip", "link", "set", device, "netns", name)
            run("ip", "-n", name, "addr", "add", f"{address}/24", "dev", device)
            run("ip", "-n", name, "link", "set", device, "up")
            run("ip", "-n", name, "link", "set", "lo", "up")
        if self.client is not None:
            device = f"ll{os.getpid() % 100000}c"
            self.devices[packed(self.client)] = open_tun(device)
            run("ip", "addr", "add", f"{self.client}/24", "dev", device)
            run("ip", "link", "set", device, "up")

    def carry(self) -> None:
        """Until stdin ends."""
        order = itertools.count()
        late: list[tuple[float, int, int, bytes]] = []
        poll = select.poll()
        poll.register(0, select.POLLIN)
        for device in self.devices.values():
            poll.register(device, select.POLLIN)
        while True:
            wait = max(0.0, late[0][0] - time.monotonic()) if late else 1.0
            for number, _ in poll.poll(wait * 1000):
                if number == 0:
                    order_given = os.read(0, 4096).decode()
                    if not order_given:
                        return
                    self.cut = order_given.split()[-1] == "cut"
                    print("done", flush=True)
                    continue
                for packet in packets(number):
                    self._forward(packet, late, order)
            now = time.monotonic()
            while late and late[0][0] <= now:
                _, _, device, packet = heapq.heappop(late)
                write(device, packet)

    def _forward(
        self, packet: bytes, late: list[tuple[float, int, int, bytes]], order: itertools.count[int]
    ) -> None:
        device = self.devices.get(packet[16:20])
        if len(packet) < 20 or packet[0] >> 4 != 4 or device is None:
            return
        if self.client is not None and packed(self.client) in (packet[12:16], packet[16:20]):
            write(device, packet)
        elif self.cut or self._random.random() < self.loss or len(late) > QUEUE:
            self.lost += 1
        else:
            self.passed += 1
            heapq.heappush(late, (time.monotonic() + self.delay, next(order), device, packet))

    def remove(self) -> None:
        for name in self.made:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def packed(address: str) -> bytes:
    return bytes(map(int, address.split(".")))


def packets(device: int) -> list[bytes]:
    found: list[bytes] = []
    while len(found) < 100:
        try:
            found.append(os.read(device, 65536))
        except OSError:
            break
    return found


def write(device: int, packet: bytes) -> None:
    try:
        os.write(device, packet)
    except OSError:
        return  # as lost


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("places", nargs="+")
    parser.add_argument("--client")
    parser.add_argument("--delay", type=float, default=0.02)
    parser.add_argument("--loss", type=float, default=0.01)
    given = parser.parse_args()
    network = Network(dict(one.split("=") for one in given.places), given.client, given.delay, given.loss)
    try:
        network.make()
        print("ready", flush=True)
        network.carry()
    except (Impossible, FileNotFoundError) as error:
        print(error, flush=True)
        return 3
    finally:
        network.remove()
        print(f"{network.passed} packets passed, {network.lost} were lost", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
