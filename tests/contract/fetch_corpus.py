"""URLs that the fetcher must refuse to every client."""

from __future__ import annotations

# All known ways to write an address of this machine or of a private network. Each is tried with https:// and
# http://, with and without the listener's port.
HOSTS = [
    # spelled out
    "127.0.0.1", "127.0.0.2", "127.255.255.254", "0.0.0.0", "10.0.0.1", "172.16.0.1", "172.31.255.255", "192.168.0.1",
    "169.254.169.254", "169.254.170.2", "100.64.0.1", "100.100.100.200", "192.0.0.192", "198.18.0.1", "224.0.0.1",
    "239.255.255.250", "240.0.0.1", "255.255.255.255", "168.63.129.16", "192.0.2.1", "203.0.113.1",
    # numbers, octal, hexadecimal, parts left out
    "2130706433", "0x7f000001", "0x7f.1", "0x7f.0.0.1", "0X7F.0.0.1", "0177.0.0.1", "0177.1", "127.1", "127.0.1", "0", "0x0",
    "00000177.0.0.1", "127.000.000.001", "127.0.0.01", "127.0.0.0x1", "017700000001", "2852039166", "0xa9fea9fe",
    "0251.0376.0251.0376", "127.0.0.1.", "127.0.0.1..", "127..0.0.1", "127.0.0", "4294967297", "6425673729", "1.0x7f000001",
    # other alphabets
    "１２７.０.０.１", "127。0。0。1", "127．0．0．1", "127｡0｡0｡1", "①②⑦.⓪.⓪.①", "ⓛocalhost", "ｌｏｃａｌｈｏｓｔ", "١٢٧.٠.٠.١",
    "127.0.0.1\u200b", "localhost\u00ad", "xn--localhost", "loc%61lhost", "%31%32%37.0.0.1", "127%2e0%2e0%2e1", "127.0.0.1%00.example.com",
    # names of this machine and its network
    "localhost", "LOCALHOST", "localhost.", "localhost.localdomain", "metadata", "metadata.google.internal", "kubernetes",
    "kubernetes.default.svc", "redis", "ip6-localhost", "127.0.0.1.nip.test",
    # IPv6
    "[::1]", "[::]", "[0:0:0:0:0:0:0:1]", "[0000::0001]", "[::ffff:127.0.0.1]", "[::ffff:7f00:1]", "[::127.0.0.1]", "[::7f00:1]",
    "[::ffff:0:127.0.0.1]", "[::ffff:169.254.169.254]", "[::ffff:a9fe:a9fe]", "[64:ff9b::127.0.0.1]", "[64:ff9b::a9fe:a9fe]",
    "[64:ff9b::10.0.0.1]", "[64:ff9b:1::7f00:1]", "[2002:7f00:1::]", "[2002:a9fe:a9fe::]", "[2002:c0a8:1::1]",
    "[2001:0:7f00:1::]", "[2001:0:4136:e378:8000:63bf:80ff:fffe]", "[fe80::1]", "[fe80::1%25lo]", "[fe80::1%lo]", "[::1%25lo]",
    "[fc00::1]", "[fd00:ec2::254]", "[fec0::1]", "[ff02::1]", "[100::1]", "[2001:db8::1]", "[5f00::1]", "[3fff::1]",
    "[::1", "::1", "::1]", "[::1]x", "[127.0.0.1]", "[v1.127.0.0.1]", "[localhost]", "[]", "[[::1]]",
    # two hosts in one
    "example.com@127.0.0.1", "127.0.0.1@example.test", "user:password@127.0.0.1", "@127.0.0.1", ":@127.0.0.1", "%40127.0.0.1",
    "example.test#@127.0.0.1", "example.test?@127.0.0.1", "127.0.0.1#@example.test", "127.0.0.1\\@example.test",
    "example.test\\@127.0.0.1", "example.test\\.127.0.0.1", "127.0.0.1,example.test", "127.0.0.1;example.test",
    "127.0.0.1 example.test", "example.test 127.0.0.1", "127.0.0.1\t", "127.0.0.1\r\nHost:x", "127.0.0.1\n", "127.0.0.1\0",
    "\t127.0.0.1", "1\t27.0.0.1", "127.0.0.1\x7f", "127.0.0.1\u2028", "127.0.0.1\ud800", "127.0.0.1／", "127.0.0.1？", "127.0.0.1＃",
    "", ".", "..", "-", "_", "*", "$(id)", "`id`", "a" * 64 + ".test", "a." * 130 + "test",
]  # fmt: skip
WHOLE_URLS = [
    "", "/", "//127.0.0.1:{port}/", "///127.0.0.1:{port}/", "/etc/passwd", "etc/passwd", "~/x", "C:\\x", "\\\\127.0.0.1\\x",
    "file:///etc/passwd", "file://127.0.0.1/etc/passwd", "FILE:///etc/passwd", "ftp://127.0.0.1:{port}/", "gopher://127.0.0.1:{port}/_x",
    "dict://127.0.0.1:{port}/", "ldap://127.0.0.1:{port}/", "tftp://127.0.0.1:{port}/", "ws://127.0.0.1:{port}/", "wss://127.0.0.1:{port}/",
    "s3://bucket/key", "unix:///var/run/docker.sock", "http+unix://%2Fvar%2Frun%2Fdocker.sock/", "jar:http://127.0.0.1:{port}!/",
    "javascript:1", "blob:https://127.0.0.1:{port}/", "view-source:http://127.0.0.1:{port}/", "netdoc:///etc/passwd", "about:blank",
    "http:127.0.0.1:{port}", "https:127.0.0.1:{port}", "http:/127.0.0.1:{port}/", "http:///127.0.0.1:{port}/", "http:\\\\127.0.0.1:{port}\\",
    "http:/\\127.0.0.1:{port}/", "http://", "https://", "https:///", "https://?", "https://#", "https://:{port}/", " http://127.0.0.1:{port}/",
    "\nhttps://127.0.0.1:{port}/", "ht\ntps://127.0.0.1:{port}/", "url:http://127.0.0.1:{port}/", "http://http://127.0.0.1:{port}/",
    "https://127.0.0.1:0/", "https://127.0.0.1:-1/", "https://127.0.0.1:99999/", "https://127.0.0.1:{port}:443/", "https://127.0.0.1:443:{port}/",
    "https://127.0.0.1:４４３/", "https://127.0.0.1:{port}x/", "https://example.test:22/", "https://example.test:8080/",
    "https://127.0.0.1:{port}/" + "a" * 9000,
]  # fmt: skip


def corpus(port: int) -> list[str]:
    urls = [
        f"{scheme}://{host}{at}/x?q#f"
        for scheme in ("https", "http")
        for host in HOSTS
        for at in ("", f":{port}")
    ]
    return urls + [url.replace("{port}", str(port)) for url in WHOLE_URLS]
