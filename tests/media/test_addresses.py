"""The addresses that media are never fetched from."""

from ipaddress import ip_address

import pytest

from media.sources.addresses import is_public


@pytest.mark.parametrize(
    "address",
    [
        "0.0.0.0",
        "10.0.0.1",
        "100.64.0.1",  # carrier-grade NAT
        "100.100.100.200",  # a cloud's metadata service
        "127.0.0.1",
        "127.255.255.254",
        "168.63.129.16",  # a cloud's service for its machines
        "169.254.169.254",
        "172.16.0.1",
        "172.31.255.255",
        "192.0.0.1",
        "192.0.2.1",
        "192.88.99.1",
        "192.168.1.1",
        "198.18.0.1",
        "203.0.113.5",
        "224.0.0.1",
        "240.0.0.1",
        "255.255.255.255",
        "::",
        "::1",
        "::7f00:1",  # IPv4-compatible
        "::ffff:127.0.0.1",  # IPv4-mapped
        "::ffff:10.0.0.1",
        "64:ff9b::10.0.0.1",  # NAT64
        "64:ff9b:1::1",
        "100::1",  # discard
        "2001::1",  # Teredo
        "2001:db8::1",
        "2002:7f00:1::",  # 6to4 of 127.0.0.1
        "2002:0808:0808::1",  # 6to4 at all
        "3fff::1",
        "5f00::1",
        "fc00::1",
        "fd00:ec2::254",  # a cloud's metadata service
        "fe80::1",
        "fe80::1%eth0",
        "fec0::1",
        "ff02::1",
    ],
)
def test_an_address_of_special_purpose_is_not_public(address: str) -> None:
    assert not is_public(ip_address(address))


@pytest.mark.parametrize(
    "address",
    [
        "8.8.8.8",
        "100.63.255.255",
        "172.15.255.255",
        "172.32.0.1",
        "223.255.255.254",
        "2606:4700::1111",
        "2a00:1450:4001::200e",
        "::ffff:8.8.8.8",
        "64:ff9b::8.8.8.8",
    ],
)
def test_an_address_of_the_internet_is_public(address: str) -> None:
    assert is_public(ip_address(address))
