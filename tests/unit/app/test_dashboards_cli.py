"""`eldr dashboards push` against an HTTP server that answers as Grafana's API does."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from app import cli

FILES = Path(__file__).parents[3] / "dashboards"
TOKEN = "glsa_secret"


class Grafana(ThreadingHTTPServer):
    """Keeps what is posted; under a path of its own, as behind a proxy."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.folders: dict[str, Any] = {}
        self.boards: dict[str, Any] = {}
        self.log: list[tuple[str, str]] = []
        self.may_write = True

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/grafana"


class Handler(BaseHTTPRequestHandler):
    server: Grafana

    def do_GET(self) -> None:
        kind, _, uid = self._path().rpartition("/")
        if self.path == "/grafana/api/health":
            return self._answer(200, {"database": "ok", "version": "11.3.0"})
        if not self._is_known():
            return self._answer(401, {"message": "Invalid API key"})
        there = {"/folders": self.server.folders, "/dashboards/uid": self.server.boards}.get(kind)
        if there is None or uid not in there:
            return self._answer(404, {"message": "not found"})
        return self._answer(200, there[uid])

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if not self._is_known():
            return self._answer(401, {"message": "Invalid API key"})
        if not self.server.may_write:
            return self._answer(403, {"message": "You'll need additional permissions"})
        self.server.log.append(("POST", self._path()))
        if self._path() == "/folders":
            self.server.folders[body["uid"]] = body
        elif self._path() == "/dashboards/db":
            assert body["overwrite"] is True
            board = body["dashboard"]
            assert board["id"] is None  # another number would name somebody else's dashboard
            self.server.boards[board["uid"]] = {
                "dashboard": {**board, "id": 7, "version": 3},
                "meta": {"folderUid": body["folderUid"]},
            }
        else:
            return self._answer(404, {"message": "not found"})
        return self._answer(200, {"status": "success"})

    def _path(self) -> str:
        return self.path.removeprefix("/grafana/api")

    def _is_known(self) -> bool:
        return self.headers.get("authorization") == f"Bearer {TOKEN}"

    def _answer(self, status: int, body: dict[str, Any]) -> None:
        raw = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def grafana(monkeypatch: pytest.MonkeyPatch) -> Iterator[Grafana]:
    monkeypatch.setenv("GRAFANA_TOKEN", TOKEN)
    server = Grafana()
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def push(url: str, files: Path = FILES) -> int:
    return cli.main(["dashboards", "push", "--url", url, "--files", str(files)])


def test_a_second_push_changes_nothing_and_a_third_mends(
    grafana: Grafana, capsys: pytest.CaptureFixture[str]
) -> None:
    assert push(grafana.url) == 0
    assert capsys.readouterr().out.count("created") == 3
    assert grafana.log == [("POST", "/folders")] + [("POST", "/dashboards/db")] * 3
    assert set(grafana.boards) == {"eldr-overview", "eldr-locality", "eldr-cache"}
    assert set(grafana.folders) == {"eldr-serve"}
    assert {b["meta"]["folderUid"] for b in grafana.boards.values()} == {"eldr-serve"}
    assert push(grafana.url + "/") == 0
    assert capsys.readouterr().out.count("unchanged") == 3
    assert len(grafana.log) == 4
    grafana.boards["eldr-cache"]["dashboard"]["panels"] = []
    grafana.boards["eldr-locality"]["meta"]["folderUid"] = "elsewhere"
    assert push(grafana.url) == 0
    assert capsys.readouterr().out.count("updated") == 2
    assert grafana.boards["eldr-cache"]["dashboard"]["panels"]


def test_refusals_say_what_to_do(
    grafana: Grafana, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    grafana.may_write = False
    assert push(grafana.url) == 1
    assert "role Editor" in capsys.readouterr().err
    root = grafana.url.removesuffix("/grafana")
    assert push(root) == 1
    assert "is no Grafana" in capsys.readouterr().err
    monkeypatch.setenv("GRAFANA_TOKEN", "glsa_other")
    assert push(grafana.url) == 1
    out, err = capsys.readouterr()
    assert "does not know the token in GRAFANA_TOKEN" in err
    assert "glsa_other" not in out + err


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("http://127.0.0.1:1", "no Grafana answers at http://127.0.0.1:1"),
        ("127.0.0.1:3000", "must be http(s)://"),
        ("http://admin:hunter2@127.0.0.1:3000", "without a user"),
    ],
)
def test_bad_urls(
    url: str, text: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRAFANA_TOKEN", TOKEN)
    assert push(url) != 0
    out, err = capsys.readouterr()
    assert text in err
    assert "hunter2" not in out + err
    assert "Traceback" not in err


@pytest.mark.parametrize("token", [None, " ", "glsa_a\nb"])
def test_tokens_that_are_none(
    token: str | None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("GRAFANA_TOKEN", raising=False)
    if token is not None:
        monkeypatch.setenv("GRAFANA_TOKEN", token)
    assert push("http://127.0.0.1:1") == 2
    err = capsys.readouterr().err
    assert "GRAFANA_TOKEN" in err
    assert "glsa_a" not in err


def test_files_that_are_no_dashboards(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRAFANA_TOKEN", TOKEN)
    assert push("http://127.0.0.1:1", tmp_path) == 2
    assert "no .json files" in capsys.readouterr().err
    (tmp_path / "a.json").write_text("{}")
    assert push("http://127.0.0.1:1", tmp_path) == 2
    assert "is no dashboard" in capsys.readouterr().err
