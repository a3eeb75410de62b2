"""Forwards packets between two interfaces, delays them and loses some, for kernels without `netem`.

    python scripts/forward.py eth0 eth1 --delay 0.02 --jitter 0.01 --loss 0.01

Runs until it is killed. Needs Linux and root.
"""

import argparse
import heapq
import random
import select
import socket
import sys
import time
from contextlib import suppress

# Constants of Linux.
ETH_P_ALL, PACKET_OUTGOING = 3, 4


def forward(names: list[str], delay: float, jitter: float, loss: float, seed: int) -> None:
    """Forwards packets both ways.

    Args:
      names: the two interfaces.
      delay: seconds by which every packet is delayed.
      jitter: greatest further delay in seconds. Packets may overtake each other.
      loss: share of the packets that is lost.
    """
    ends = []
    for name in names:
        end = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ETH_P_ALL))
        end.bind((name, ETH_P_ALL))
        ends.append(end)
    rng, number = random.Random(seed), 0
    waiting: list[tuple[float, int, int, bytes]] = []
    while True:
        left = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        for end in select.select(ends, [], [], left)[0]:
            packet, where = end.recvfrom(1 << 16)
            if where[2] != PACKET_OUTGOING and rng.random() >= loss:
                number += 1  # Packets of the same time keep their order.
                at = time.monotonic() + delay + jitter * rng.random()
                heapq.heappush(waiting, (at, number, 1 - ends.index(end), packet))
        while waiting and waiting[0][0] <= time.monotonic():
            _, _, to, packet = heapq.heappop(waiting)
            with suppress(OSError):  # The interface is down.
                ends[to].send(packet)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs=2, metavar="INTERFACE")
    parser.add_argument("--delay", type=float, default=0.0, help="seconds for each packet")
    parser.add_argument("--jitter", type=float, default=0.0, help="greatest further delay")
    parser.add_argument("--loss", type=float, default=0.0, help="share of packets that is lost")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    forward(args.names, args.delay, args.jitter, args.loss, args.seed)


if __name__ == "__main__":
    sys.exit(main())
