"""The page without a browser: its routes and headers, its files, the report on the pools."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from html.parser import HTMLParser
from typing import Any

import httpx
import pytest

from cluster.rpc import SentLog
from cluster.types.members import Member, Role
from cluster.types.messages import EncodeTotals, LoadReport, SentTotals
from router.api.app import build_api
from router.flow.state import WorkerState
from router.members import Peer
from router.page.pools import pool_fields
from router.page.site import POLICY, STATIC, TYPES, is_public, read_static
from tests.fakes.fake_door import FakeDoor

NAMES = sorted(path.name for path in STATIC.iterdir())
ADDRESS = re.compile(r"(?:https?:)?//[\w.-]+\.\w+|\bwss?:")
NAMESPACES = ("http://www.w3.org/2000/svg",)  # are never fetched


async def get(path: str, method: str = "GET", **headers: str) -> httpx.Response:
    transport = httpx.ASGITransport(build_api(FakeDoor()), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://door") as client:
        return await client.request(method, path, headers=headers)


@pytest.mark.parametrize("path", ["/", *(f"/page/{name}" for name in NAMES)])
async def test_every_file_is_served_with_its_type_and_all_headers(path):
    answer = await get(path)
    name = path.removeprefix("/page/").removeprefix("/") or "index.html"
    assert answer.status_code == 200 and answer.content == (STATIC / name).read_bytes()
    assert answer.headers["content-type"] == TYPES["." + name.rpartition(".")[2]]
    assert answer.headers["content-security-policy"] == POLICY
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["referrer-policy"] == "no-referrer"
    assert is_public(path)


async def test_a_known_etag_is_answered_without_the_file():
    first = await get("/")
    for known in (first.headers["etag"], f'"other", W/{first.headers["etag"]}'):
        again = await get("/", **{"If-None-Match": known})
        assert again.status_code == 304 and again.content == b""
        assert again.headers["etag"] == first.headers["etag"]
    assert (await get("/", **{"If-None-Match": '"other"'})).status_code == 200


@pytest.mark.parametrize("path", ["/page/nothing.js", "/page/", "/page/..%2fsite.py", "/page/%2e%2e/site.py"])
async def test_other_names_have_openais_error_form(path):
    answer = await get(path)
    assert answer.status_code == 404 and answer.json()["error"]["code"] == "not_found"


def test_the_policy_allows_this_server_alone_and_nothing_inline():
    rules = {name: sources for name, *sources in (rule.split() for rule in POLICY.split("; "))}
    assert rules["default-src"] == ["'none'"]
    for name in ("script-src", "style-src", "connect-src"):
        assert rules[name] == ["'self'"]
    assert {source for sources in rules.values() for source in sources} == {
        "'none'", "'self'", "data:", "'script'",
    }  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_no_file_names_another_host(name):
    text = (STATIC / name).read_text()
    for namespace in NAMESPACES:
        text = text.replace(namespace, "")
    assert not ADDRESS.findall(text)


def test_no_script_makes_markup_of_a_string():
    text = "".join((STATIC / name).read_text() for name in NAMES if name.endswith(".js"))
    assert not re.findall(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function", text
    )


class Elements(HTMLParser):
    """All elements, and the text below the labels."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, {name: value or "" for name, value in attrs}))


@pytest.fixture(scope="module")
def elements() -> list[tuple[str, dict[str, str]]]:
    parser = Elements()
    parser.feed((STATIC / "index.html").read_text())
    return parser.found


def test_every_role_and_every_field_has_a_label(elements):
    ids = {attributes["id"] for _, attributes in elements if "id" in attributes}
    labelled = {attributes.get("for") for tag, attributes in elements if tag == "label"}
    for tag, attributes in elements:
        if tag in ("textarea", "input", "section", "form", "dialog") or "role" in attributes:
            has_own = "aria-label" in attributes or attributes.get("aria-labelledby") in ids
            assert has_own or attributes.get("id") in labelled or attributes.get("id") == "key-form", (
                attributes
            )
    assert {name for name in labelled if name} <= ids


def test_the_page_has_nothing_inline_and_loads_only_its_own_files(elements):
    assert elements[0][0] == "html" and elements[0][1]["lang"] == "en"
    for tag, attributes in elements:
        assert tag != "style" and "style" not in attributes
        assert not [name for name in attributes if name.startswith("on")]
        for name in ("src", "href"):
            value = attributes.get(name, "#")
            assert value.startswith("#") or value.removeprefix("page/") in NAMES
        assert tag != "script" or "src" in attributes


@pytest.mark.parametrize("name", [name for name in NAMES if name.endswith(".js")])
def test_scripts_import_files_that_exist_and_names_that_these_export(name):
    text = (STATIC / name).read_text()
    for names, file in re.findall(r'^import \{ ([^}]*) \} from "\./([^"]*)";$', text, re.MULTILINE):
        exported = set(exports_of((STATIC / file).read_text()))
        assert set(names.split(", ")) <= exported
        assert all(len(re.findall(rf"\b{each}\b", text)) > 1 for each in names.split(", ")), "not used"


def exports_of(text: str) -> Iterator[str]:
    yield from re.findall(r"^export (?:async )?(?:class|const|function\*?) (\w+)", text, re.MULTILINE)


def test_every_element_that_scripts_look_for_exists(elements):
    ids = {attributes["id"] for _, attributes in elements if "id" in attributes}
    main = (STATIC / "main.js").read_text()
    assert set(re.findall(r'byId\("([\w-]+)"\)', main)) <= ids


@pytest.mark.skipif(shutil.which("node") is None, reason="there is no node to read JavaScript with")
def test_the_scripts_are_javascript_modules():
    for name in NAMES:
        if name.endswith(".js"):
            source = (STATIC / name).read_bytes()
            done = subprocess.run(
                ["node", "--check", "--input-type=module"], input=source, capture_output=True, timeout=60
            )
            assert done.returncode == 0, done.stderr.decode()


def test_only_known_kinds_of_files_are_there_and_the_page_stays_small():
    assert set(read_static()) == set(NAMES)
    assert sum(len(file.content) for file in read_static().values()) < 64 << 10


def joined(replica_id: str, role: Role, *loads: LoadReport) -> tuple[Peer, WorkerState]:
    member = Member(
        replica_id=replica_id, role=role, address="unix:/a", model="model", layout="layout", num_blocks=100
    )
    connection: Any = None  # nothing is sent
    peer = Peer(member, connection, is_listed=True, log=SentLog(""))
    for load in loads:
        peer.reported(load)
    return peer, WorkerState(member, num_requests=2, is_silent=replica_id == "silent")


def report(*joined: tuple[Peer, WorkerState], shows_workers: bool = False) -> list[dict[str, Any]]:
    peers, workers = zip(*joined, strict=True)
    return pool_fields([Role.PREFILL, Role.DECODE, Role.WHOLE], peers, workers, shows_workers=shows_workers)


def test_pools_name_workers_only_if_that_is_allowed_and_list_empty_pools():
    workers = joined("secret", Role.DECODE), joined("silent", Role.DECODE)
    for shows, names in ((False, ["decode 1", "decode 2"]), (True, ["secret", "silent"])):
        prefill, decode, whole = report(*workers, shows_workers=shows)
        assert prefill == {"role": "prefill", "workers": []} and whole["workers"] == []
        assert [worker["name"] for worker in decode["workers"]] == names
        assert [worker["is_avoided"] for worker in decode["workers"]] == [False, True]
        assert "secret" not in str(decode) or shows


def test_a_worker_of_several_phases_reports_its_encoder_apart():
    encoder = LoadReport(is_of_encoder=True, num_waiting=3, encoded=EncodeTotals(5, 2), sent=SentTotals(10))
    rest = LoadReport(num_running=1, num_used_blocks=7, num_cached_blocks=9, sent=SentTotals(1, 4))
    (worker,) = report(joined("w", Role.WHOLE, encoder, rest))[2]["workers"]
    by_part = {part["part"]: part for part in worker["parts"]}
    assert worker["sent_bytes"] == 15 and worker["num_requests"] == 2
    assert by_part["encode"]["num_waiting"] == 3 and by_part["encode"]["num_blocks"] is None
    assert by_part["encode"]["num_encoded"] == 5 and by_part["encode"]["num_cached_items"] == 2
    assert by_part["whole"]["num_used_blocks"] == 7 and by_part["whole"]["num_blocks"] == 100


async def test_the_report_on_the_pools_is_never_stored():
    answer = await get("/pools")
    assert answer.json() == FakeDoor().pools() and answer.headers["cache-control"] == "no-store"
