"""Which URLs may be read, and what they become. No name is resolved."""

from __future__ import annotations

from urllib.parse import urlsplit

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from yarl import URL

from cluster.errors import MediaError
from cluster.media.fetch.policy import FetchPolicy, lists
from cluster.media.fetch.urls import MAX_URL_CHARS, check_url, is_internal, redirected

ANY = FetchPolicy()


@pytest.mark.parametrize(
    "text, expected",
    [
        ("https://example.com", "https://example.com/"),
        ("HTTPS://Example.COM/A", "https://example.com/A"),
        ("https://example.com:443/a#part", "https://example.com/a"),
        ("https://example.com:/a", "https://example.com/a"),
        (
            "https://example.com/a/../b?x=%2F%2f+%20&y=a%2Bb",
            "https://example.com/a/../b?x=%2F%2f+%20&y=a%2Bb",
        ),
        ("https://example.com//a?b=c?d/e:f@g", "https://example.com//a?b=c?d/e:f@g"),
        ("https://bücher.example/ä", "https://xn--bcher-kva.example/%C3%A4"),
        ("https://ｅxample.com/", "https://example.com/"),
        ("https://my_bucket.s3.example.com/", "https://my_bucket.s3.example.com/"),
        ("https://8.8.8.8/", "https://8.8.8.8/"),
        ("https://[2606:4700:0:0::1111]/", "https://[2606:4700::1111]/"),
    ],
)
def test_a_public_url_is_read_as_it_was_written(text, expected):
    assert str(check_url(text, ANY)) == expected


@pytest.mark.parametrize(
    "text, message",
    [
        ("http://example.com/", "only https: and data:"),
        ("file:///etc/passwd", "only https: and data:"),
        ("data:image/png;base64,AAAA", "only https: and data:"),
        ("example.com/a", "only https: and data:"),
        ("", "only https: and data:"),
        ("https:example.com", "the host of the URL is not valid"),
        ("https://user:secret@example.com/", "the host of the URL is not valid"),
        ("https://@example.com/", "the host of the URL is not valid"),
        ("https://exa%6dple.com/", "the host of the URL is not valid"),
        ("https://[fe80::1%25eth0]/", "the host of the URL is not valid"),
        ("https://example.com./", "the host of the URL is not valid"),
        ("https://-/", "not public"),
        ("https://example..com/", "the host of the URL is not valid"),
        ("https://127.1/", "the host of the URL is not valid"),
        ("https://0x7f.1/", "the host of the URL is not valid"),
        ("https://2130706433/", "the host of the URL is not valid"),
        ("https://example.0x/", "the host of the URL is not valid"),
        ("https://010.8.8.8/", "the host of the URL is not valid"),
        ("https://example.com:70000/", "the host of the URL is not valid"),
        ("https://example.com:8443/", "host or port is not allowed"),
        ("https://example.com:0/", "host or port is not allowed"),
        ("https://example.com\\@evil.test/", "a space, a backslash or a control"),
        ("https://example.com/a b", "a space, a backslash or a control"),
        ("https://example.com/a\r\nX: y", "a space, a backslash or a control"),
        ("https://example.com/\0", "a space, a backslash or a control"),
        ("https://example.com/\u200b", "a space, a backslash or a control"),
        ("https://example.com/\ud800", "a space, a backslash or a control"),
        ("https://example.com/" + "a" * MAX_URL_CHARS, "longer than"),
        ("https://127.0.0.1/", "not public"),
        ("https://１２７.0.0.1/", "not public"),
        ("https://[::1]/", "not public"),
        ("https://[::ffff:8.8.8.8]/", "not public"),
        ("https://[64:ff9b::7f00:1]/", "not public"),
        ("https://localhost/", "not public"),
        ("https://redis/", "not public"),
    ],
)
def test_what_is_not_public_or_not_clear_is_refused(text, message):
    with pytest.raises(MediaError, match=message) as caught:
        check_url(text, ANY)
    assert "secret" not in caught.value.message


LISTED = FetchPolicy(
    allowed_hosts=("example.com", "*.cdn.example", "example.com:8443", "8.8.8.8", "[2606:4700:0::1111]:444"),
    denied_hosts=("bad.cdn.example", "*.bad.cdn.example", "store:9000"),
    internal_hosts=("store", "store:9000", "store:9001", "10.0.0.1:80"),
)


@pytest.mark.parametrize(
    "text",
    ["https://example.com/", "https://example.com:8443/", "https://a.cdn.example/", "https://a.b.cdn.example/", "https://8.8.8.8/",
     "https://[2606:4700::1111]:444/", "http://store/", "https://store/", "http://store:9001/", "https://store:9001/", "http://10.0.0.1/"],
)  # fmt: skip
def test_what_is_listed_is_allowed(text):
    assert str(check_url(text, LISTED)) == text


@pytest.mark.parametrize(
    "text",
    ["https://www.example.com/", "https://xexample.com/", "https://cdn.example/", "https://xcdn.example/", "https://a.cdn.example:8443/",
     "https://bad.cdn.example/", "https://x.bad.cdn.example/", "https://8.8.4.4/", "http://example.com/", "https://[2606:4700::1111]/",
     "http://store:9000/", "http://store:9002/", "http://10.0.0.1:443/", "https://example.com.evil.test/"],
)  # fmt: skip
def test_with_an_allow_list_nothing_else_is(text):
    with pytest.raises(MediaError, match=r"not allowed|only https"):
        check_url(text, LISTED)


def test_an_allowed_host_must_be_public_all_the_same():
    with pytest.raises(MediaError, match="not public"):
        check_url("https://10.0.0.1/", FetchPolicy(allowed_hosts=("10.0.0.1",)))


def test_only_listed_hosts_and_ports_are_internal():
    assert is_internal(check_url("http://store:9001/", LISTED), LISTED)
    assert not is_internal(check_url("https://example.com/", LISTED), LISTED)


def test_an_entry_without_a_port_means_the_schemes_own_or_every_port_of_a_denied_host():
    assert lists(("a.test",), "a.test", 443, 443) and not lists(("a.test",), "a.test", 444, 443)
    assert lists(("a.test",), "a.test", 444, None) and not lists(("a.test:443",), "a.test", 444, None)


@pytest.mark.parametrize(
    "location, expected",
    [("/b", "https://example.com/b"), ("b?c", "https://example.com/x/b?c"), ("//other.example/b", "https://other.example/b"),
     ("https://other.example:443/b#c", "https://other.example/b"), ("?q=%2F", "https://example.com/x/a?q=%2F")],
)  # fmt: skip
def test_redirects_may_be_relative(location, expected):
    assert str(redirected(URL("https://example.com/x/a"), location, ANY)) == expected


@pytest.mark.parametrize(
    "location",
    [
        None,
        "",
        "\t/b",
        "/b\ud800",
        "http://store/",
        "//127.0.0.1/",
        "//[::1/",
        "//user@example.com/",
        "\\\\x",
    ],
)
def test_redirects_elsewhere_are_refused(location):
    with pytest.raises(MediaError):
        redirected(URL("https://example.com/"), location, FetchPolicy(internal_hosts=("store",)))


authorities = st.text(alphabet="a1.０:@[]%\\/?#-x\t 。", max_size=20)


@given(authorities)
@example("1.1.1.1@a.a")
@example("a.a\\@1.1.1.1")
def test_another_parser_sees_the_host_that_was_checked(authority):
    try:
        url = check_url(f"https://{authority}/", ANY)
    except MediaError:
        return
    seen = urlsplit(str(url))
    assert (seen.hostname, seen.port or 443, seen.username) == (url.raw_host, url.port, None)
    assert str(check_url(str(url), ANY)) == str(url)
