"""What a client must not reach through the fetcher: a host on loopback counts the connections."""

from __future__ import annotations

import asyncio
import socket
import ssl
import threading
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from cluster.errors import ConfigError, MediaError
from cluster.media.fetch import Fetcher, FetchPolicy
from cluster.media.fetch.addresses import is_global
from cluster.media.fetch.dial import open_session, was_refused
from cluster.media.sources import MediaSource
from cluster.types.media import Modality
from tests.contract.fetch_corpus import corpus
from tests.contract.fetch_host import MediaHost, answer, redirect
from tests.fakes.clock import ManualClock


@pytest.fixture
async def host():
    async with MediaHost({"/x?q": answer(b"secret")}) as host:
        yield host


@pytest.fixture
async def host_v6(host: MediaHost):
    """The same port on ::1, where there is IPv6."""
    v6 = MediaHost({"/x?q": answer(b"secret")}, address="::1")
    v6.port = host.port
    try:
        await v6.start()
    except OSError:
        yield None
        return
    yield v6
    await v6.__aexit__()


async def to_loopback(name: str) -> Sequence[str]:
    return ["127.0.0.1"]


async def read(fetcher: Fetcher, url: str) -> bytes:
    source = MediaSource(Modality.IMAGE, url)
    return (await fetcher.read(source, 2**20, item_idx=2)).data


async def refusal(fetcher: Fetcher, url: str) -> str:
    with pytest.raises(MediaError, match=r"^item 2 \(image\): ") as caught:
        await read(fetcher, url)
    return caught.value.message


def any_port(port: int, **policy) -> FetchPolicy:
    """The listener's port is allowed for all hosts: only the address can be refused."""
    return FetchPolicy(allowed_hosts=("*", f"*:{port}"), **policy)


@pytest.mark.parametrize("lookup", [None, to_loopback], ids=["system lookup", "all names lead here"])
async def test_no_url_of_the_corpus_reaches_a_listener(host, host_v6, lookup):
    urls = corpus(host.port)
    assert len(urls) >= 600
    for policy in (FetchPolicy(), any_port(host.port)):
        fetcher = Fetcher(policy, ManualClock(), lookup=lookup)
        for url in urls:
            if lookup is None and (
                "test" in url or "internal" in url or "svc" in url or "localdomain" in url
            ):
                continue  # would ask a real name server
            message = await refusal(fetcher, url)
            assert "127.0.0.1" not in message and "secret" not in message
        await fetcher.aclose()
    assert host.num_connections == 0
    assert host_v6 is None or host_v6.num_connections == 0


async def test_no_redirect_to_the_corpus_reaches_a_listener(host, host_v6):
    async with MediaHost() as trusted:
        fetcher = Fetcher(
            any_port(host.port, internal_hosts=(trusted.at,)), ManualClock(), lookup=to_loopback
        )
        locations = [url for url in corpus(host.port) if url.isascii() and url.isprintable() and "://" in url]
        assert len(locations) > 400
        for idx, location in enumerate(locations):
            trusted.handlers[f"/{idx}"] = redirect(location)
            with pytest.raises(MediaError, match=r"item 2 \(image\)"):
                await read(fetcher, trusted.url(f"/{idx}"))
        assert len({request.path for request in trusted.requests}) >= len(locations)
        await fetcher.aclose()
    assert host.num_connections == 0
    assert host_v6 is None or host_v6.num_connections == 0


@pytest.mark.parametrize(
    "location",
    ["file:///etc/passwd", "data:image/png;base64,AAAA", "ftp://example.com/", "//127.0.0.1/",
     "https://127.0.0.1/x", "http://example.com/", "javascript:1", "https://user:password@example.com/",
     "https://example.com:22/", "", "\xff\xfe"],
)  # fmt: skip
async def test_a_redirect_is_checked_like_a_clients_own_url(location):
    async with MediaHost({"/a": redirect(location)}) as trusted:
        fetcher = Fetcher(FetchPolicy(internal_hosts=(trusted.at,)), ManualClock())
        await refusal(fetcher, trusted.url("/a"))
        assert len(trusted.requests) == 1
        await fetcher.aclose()


PRIVATE = [
    "127.0.0.1", "10.1.2.3", "172.20.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1", "0.0.0.0", "255.255.255.255",
    "224.0.0.1", "::1", "::", "fe80::1%lo", "fd00::1", "::ffff:127.0.0.1", "64:ff9b::7f00:1", "2002:7f00:1::", "2001:0:7f00:1::",
    "not an address", "",
]  # fmt: skip


@pytest.mark.parametrize("private", PRIVATE)
@pytest.mark.parametrize("public", [(), ("93.184.216.34",), ("93.184.216.34", "2606:4700::1111")])
async def test_a_name_with_one_address_that_is_not_public_is_refused_whole(host, private, public):
    async def lookup(name: str) -> Sequence[str]:
        return [*public, private]

    fetcher = Fetcher(any_port(host.port), ManualClock(), lookup=lookup)
    message = await refusal(fetcher, host.url("/x?q", scheme="https", host="media.test"))
    assert message == "item 2 (image): the address of this host is not public"
    assert host.num_connections == 0
    await fetcher.aclose()


# Beyond the checks of a URL: "public" is 127.0.0.1 here, everything else is not


def only(address: str):
    return lambda dialled: dialled == address


def self_signed(folder: Path, name: str) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """TLS contexts for a server of that name, and for a client that trusts only its certificate."""
    x509 = pytest.importorskip("cryptography.x509")
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder(subject, subject, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - timedelta(hours=1))
        .not_valid_after(now + timedelta(hours=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    pem = certificate.public_bytes(serialization.Encoding.PEM)
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    path = folder / "host.pem"
    path.write_bytes(private + pem)
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(path)
    return server, ssl.create_default_context(cadata=pem.decode())


@pytest.fixture
async def secure(tmp_path):
    """An https host "media.test" on 127.0.0.1, and the client's context that trusts it."""
    server_tls, client_tls = self_signed(tmp_path, "media.test")
    host = await MediaHost({"/a": answer(b"pixels")}).start(server_tls)
    yield host, client_tls
    await host.__aexit__()


async def test_https_on_a_public_address_is_read(secure):
    host, tls = secure
    fetcher = Fetcher(
        any_port(host.port), ManualClock(), lookup=to_loopback, is_public=only("127.0.0.1"), tls=tls
    )
    assert await read(fetcher, host.url("/a", scheme="https", host="media.test")) == b"pixels"
    assert await read(fetcher, host.url("/a", scheme="HTTPS", host="MEDIA.test")) == b"pixels"
    assert host.requests[0].headers["host"] == f"media.test:{host.port}"
    await fetcher.aclose()


@pytest.mark.parametrize("name, trusts", [("other.test", True), ("media.test", False)])
async def test_a_certificate_of_another_name_or_issuer_is_refused(secure, name, trusts):
    host, tls = secure
    fetcher = Fetcher(
        any_port(host.port), lookup=to_loopback, is_public=only("127.0.0.1"), tls=tls if trusts else None
    )
    message = await refusal(fetcher, host.url("/a", scheme="https", host=name))
    assert message == "item 2 (image): the host's certificate cannot be verified"
    assert not host.requests
    await fetcher.aclose()


async def test_a_name_that_turns_to_another_address_is_not_followed_there(secure):
    host, tls = secure
    answers = iter(["127.0.0.1", "127.0.0.2", "127.0.0.2"])

    async def lookup(name: str) -> Sequence[str]:
        return [next(answers)]

    trap = MediaHost(address="127.0.0.2")
    trap.port = host.port
    async with trap:
        host.handlers["/a"] = answer(b"pixels", connection="close")
        fetcher = Fetcher(any_port(host.port), lookup=lookup, is_public=only("127.0.0.1"), tls=tls)
        url = host.url("/a", scheme="https", host="media.test")
        assert await read(fetcher, url) == b"pixels"
        await host.until_closed()
        assert "not public" in await refusal(fetcher, url)
        host.handlers["/a"] = redirect("/a")
        assert "not public" in await refusal(fetcher, url)
        assert trap.num_connections == 0
        assert next(answers, None) is None
        await fetcher.aclose()


async def test_a_name_is_resolved_once_for_its_check_and_its_connection(host):
    num_lookups = 0

    async def lookup(name: str) -> Sequence[str]:
        nonlocal num_lookups
        num_lookups += 1
        return ["127.0.0.2" if num_lookups == 1 else "127.0.0.1"]

    fetcher = Fetcher(any_port(host.port), lookup=lookup, is_public=only("127.0.0.2"))
    await refusal(fetcher, host.url("/a", scheme="https", host="media.test"))  # no server listens there
    assert (num_lookups, host.num_connections) == (1, 0)
    await fetcher.aclose()


async def test_an_address_literal_is_checked_when_its_socket_is_made(host):
    """aiohttp dials a literal without asking a resolver."""
    async with open_session(is_global, to_loopback, 1.0, None) as session:
        with pytest.raises(OSError) as caught:
            await session.get(host.url("/x?q"))
    assert was_refused(caught.value)
    assert host.num_connections == 0


async def test_nothing_is_sent_to_a_peer_that_is_not_the_one_that_was_checked(host):
    """As if the connected socket led to another address than it was made for."""
    checks = iter([True, False])  # the socket, then its peer
    async with open_session(lambda address: next(checks), to_loopback, 1.0, None) as session:
        with pytest.raises(OSError) as caught:
            await session.get(host.url("/x?q"))
    assert was_refused(caught.value)
    await host.until_closed()
    assert host.num_connections == 1
    assert not host.requests


async def test_with_many_addresses_each_socket_is_checked(host):
    async def lookup(name: str) -> Sequence[str]:
        return ["127.0.0.1", "127.0.0.2", "127.0.0.3"]

    num_checks = 0

    def may_dial(address: str) -> bool:
        nonlocal num_checks
        num_checks += 1
        return num_checks <= 3  # as names they pass

    async with open_session(may_dial, lookup, 1.0, None) as session:
        with pytest.raises(OSError) as caught:
            await session.get(host.url("/x?q", host="media.test"))
    assert was_refused(caught.value)
    assert host.num_connections == 0


async def test_https_does_not_fall_back_to_http(secure):
    host, tls = secure
    async with MediaHost({"/a": answer(b"pixels")}) as plain:
        fetcher = Fetcher(
            any_port(host.port, internal_hosts=(plain.at,)),
            lookup=to_loopback,
            is_public=only("127.0.0.1"),
            tls=tls,
        )
        host.handlers["/a"] = redirect(plain.url("/a"))
        message = await refusal(fetcher, host.url("/a", scheme="https", host="media.test"))
        assert message == "item 2 (image): a redirect from https to http is not followed"
        assert plain.num_connections == 0
        await fetcher.aclose()


async def test_proxies_and_passwords_of_the_environment_are_not_used(host, monkeypatch, tmp_path):
    async with MediaHost({"/a": answer(b"pixels")}) as trusted:
        (tmp_path / "netrc").write_text("machine 127.0.0.1 login user password secret\n")
        monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
        for name in ("http_proxy", "HTTP_PROXY", "https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"):
            monkeypatch.setenv(name, host.url())
        fetcher = Fetcher(FetchPolicy(internal_hosts=(trusted.at,)))
        assert await read(fetcher, trusted.url("/a")) == b"pixels"
        assert "authorization" not in trusted.requests[0].headers
        assert host.num_connections == 0
        await fetcher.aclose()


async def test_a_denied_host_is_refused_even_if_it_is_internal(host):
    fetcher = Fetcher(FetchPolicy(internal_hosts=(host.at,), denied_hosts=("127.0.0.1",)))
    assert "not allowed" in await refusal(fetcher, host.url("/x?q"))
    assert host.num_connections == 0
    await fetcher.aclose()


async def test_an_internal_host_is_trusted_on_its_named_port_alone(host):
    async with MediaHost({"/a": answer(b"pixels")}) as trusted:
        fetcher = Fetcher(FetchPolicy(internal_hosts=(trusted.at,)))
        assert await read(fetcher, trusted.url("/a")) == b"pixels"
        await refusal(fetcher, host.url("/x?q"))
        assert host.num_connections == 0
        await fetcher.aclose()


async def test_no_local_file_is_read(tmp_path):
    path = tmp_path / "secret.png"
    path.write_bytes(b"secret")
    fetcher = Fetcher(FetchPolicy())
    for url in (
        str(path),
        f"file://{path}",
        f"file://localhost{path}",
        f"data:{path}",
        f"data:image/png;file,{path}",
    ):
        assert "secret" not in (await refusal(fetcher, url)).replace(url, "")
    await fetcher.aclose()


@pytest.mark.parametrize(
    "policy",
    [{"allowed_hosts": ("a b",)}, {"denied_hosts": ("http://x",)}, {"internal_hosts": ("x:0",)}, {"internal_hosts": ("x:65536",)},
     {"allowed_hosts": ("*x.com",)}, {"allowed_hosts": ("",)}, {"denied_hosts": ("::1",)}, {"total_timeout_s": 0.0},
     {"max_concurrent": 0}, {"cache_bytes": -1}],
)  # fmt: skip
def test_a_policy_that_means_nothing_is_refused_at_start(policy):
    with pytest.raises(ConfigError):
        FetchPolicy(**policy)


async def test_the_systems_resolver_answers_off_the_event_loop(monkeypatch):
    is_asked, may_answer = threading.Event(), threading.Event()

    def slow(*_: object, **__: object) -> list:
        is_asked.set()
        assert may_answer.wait(60), "the event loop waits for it"
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", 0))]

    monkeypatch.setattr(socket, "getaddrinfo", slow)
    fetcher = Fetcher(FetchPolicy())
    task = asyncio.create_task(refusal(fetcher, "https://media.test/"))
    while not is_asked.is_set():
        await asyncio.sleep(0.001)
    may_answer.set()
    assert "not public" in await task
    await fetcher.aclose()
