"""The way from this machine to another: which interface, and what it carries by its name."""

from dataclasses import dataclass

import psutil

# Of what a network carries by its name, the share that a connection of TCP gets (Ethernet's and its own headers).
TCP_SHARE = 0.94
ASSUMED_BITS_PER_S = 1e9


@dataclass(frozen=True)
class NetworkLink:
    """`bits_per_s`: by its name; assumed where the driver says nothing, as those of virtual machines."""

    interface: str
    bits_per_s: float
    assumed: bool = False

    @property
    def bytes_per_s(self) -> float:
        return self.bits_per_s / 8 * TCP_SHARE

    @property
    def words(self) -> str:
        return f"{self.bits_per_s / 1e9:g} Gbit/s{' (assumed)' if self.assumed else ''} of {self.interface}"


def link_of(own_address: str) -> NetworkLink | None:
    """The link of the interface that has this address of ours; None for the loopback."""
    if own_address.startswith("127.") or own_address == "::1":
        return None
    names = [
        name
        for name, addresses in psutil.net_if_addrs().items()
        if any(one.address.partition("%")[0] == own_address for one in addresses)
    ]
    megabits = psutil.net_if_stats()[names[0]].speed if names else 0
    name = names[0] if names else "the network"
    return NetworkLink(name, megabits * 1e6) if megabits > 0 else NetworkLink(name, ASSUMED_BITS_PER_S, assumed=True)
