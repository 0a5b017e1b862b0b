"""Which addresses are public."""

from __future__ import annotations

from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.media.fetch.addresses import is_global

NAT64 = IPv6Network("64:ff9b::/96")
PUBLIC = ["1.1.1.1", "8.8.8.8", "100.63.255.255", "100.128.0.0", "172.15.255.255", "172.32.0.0", "192.0.1.0", "198.17.255.255",
          "198.20.0.0", "223.255.255.255", "11.0.0.0", "9.255.255.255", "2606:4700::1111", "2a00:1450::1", "2400:cb00::1",
          "2001:200::1", "64:ff9b::8.8.8.8"]  # fmt: skip
NOT_PUBLIC = ["0.0.0.0", "0.255.255.255", "10.0.0.0", "10.255.255.255", "100.64.0.0", "100.127.255.255", "127.0.0.1", "127.255.255.255",
              "169.254.0.0", "169.254.169.254", "172.16.0.0", "172.31.255.255", "192.0.0.192", "192.0.2.1", "192.88.99.1", "192.168.255.255",
              "198.18.0.0", "198.19.255.255", "198.51.100.1", "203.0.113.1", "224.0.0.0", "239.255.255.255", "240.0.0.0",
              "255.255.255.255", "168.63.129.16", "::", "::1", "::8.8.8.8", "::ffff:8.8.8.8", "::ffff:127.0.0.1", "::ffff:0:127.0.0.1",
              "64:ff9b::127.0.0.1", "64:ff9b::169.254.169.254", "64:ff9b::10.0.0.1", "64:ff9b:1::8.8.8.8", "100::1", "2001::1",
              "2001:2::1", "2001:10::1", "2001:20::1", "2001:1ff:ffff::1", "2001:db8::1", "2002:7f00:1::", "2002:808:808::", "3fff::1",
              "3fff:fff::1", "4000::1", "5f00::1", "fc00::1", "fd00:ec2::254", "fe80::1", "fe80::1%eth0", "2606:4700::1111%eth0",
              "fec0::1", "ff02::1", "ff0e::1"]  # fmt: skip


@pytest.mark.parametrize("address", PUBLIC)
def test_public_addresses_are_public(address):
    assert is_global(address) and is_global(ip_address(address))


@pytest.mark.parametrize("address", NOT_PUBLIC)
def test_all_others_are_not(address):
    assert not is_global(address) and not is_global(ip_address(address))


@pytest.mark.parametrize(
    "text",
    ["", "localhost", "127.1", "0x7f.0.0.1", "010.0.0.1", "1.1.1.1 ", "1.1.1.1/32", "[::1]", "１.1.1.1"],
)
def test_what_is_not_an_address_is_not_public(text):
    assert not is_global(text)


@given(st.ip_addresses())
def test_nothing_is_public_that_the_standard_library_knows_to_be_special(address):
    special = address.is_private or address.is_loopback or address.is_link_local or address.is_multicast
    special = special or address.is_reserved or address.is_unspecified
    assert not (is_global(address) and special) or address in NAT64


@given(st.ip_addresses(v=4))
def test_an_embedded_ipv4_address_is_never_more_public_than_itself(address: IPv4Address):
    number = int(address)
    assert is_global(IPv6Address(0x64FF9B << 96 | number)) == is_global(address)
    tunnels = (number, 0xFFFF << 32 | number, 0xFFFF << 48 | number, 0x2002 << 112 | number << 80)
    assert not any(is_global(IPv6Address(tunnel)) for tunnel in tunnels)
    assert not is_global(IPv6Address(0x20010000 << 96 | number << 64))
