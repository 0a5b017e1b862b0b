"""Which IP addresses belong to the public internet. Pure.

The lists are our own, because the standard library's `is_global` differs between Python releases. They follow
IANA's special-purpose registries. Tunnels of IPv4 inside IPv6 are refused, except NAT64's well-known prefix:
behind DNS64 all hosts that have only IPv4 are reached through it.
"""

from __future__ import annotations

from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address

_NOT_PUBLIC_V4 = tuple(
    map(
        IPv4Network,
        (
            "0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16", "172.16.0.0/12",
            "192.0.0.0/24", "192.0.2.0/24", "192.88.99.0/24", "192.168.0.0/16", "198.18.0.0/15",
            "198.51.100.0/24", "203.0.113.0/24", "224.0.0.0/4", "240.0.0.0/4",
            # public by its number; inside an Azure machine it is the platform's own service
            "168.63.129.16/32",
        ),
    )
)  # fmt: skip
_UNICAST_V6 = IPv6Network("2000::/3")
_NOT_PUBLIC_V6 = tuple(
    map(
        IPv6Network,
        (
            "2001::/23",  # protocol assignments: Teredo, ORCHID, benchmarks
            "2001:db8::/32", "3fff::/20",  # documentation
            "2002::/16",  # 6to4
        ),
    )
)  # fmt: skip
_NAT64 = IPv6Network("64:ff9b::/96")


def is_global(address: str | IPv4Address | IPv6Address) -> bool:
    """Whether the address means the same host everywhere on the internet. False for a text that is not an
    address."""
    try:
        address = ip_address(address)
    except ValueError:
        return False
    if isinstance(address, IPv4Address):
        return not any(address in network for network in _NOT_PUBLIC_V4)
    if address.scope_id is not None:
        return False
    if address in _NAT64:
        return is_global(IPv4Address(int(address) & 0xFFFF_FFFF))
    return address in _UNICAST_V6 and not any(address in network for network in _NOT_PUBLIC_V6)
