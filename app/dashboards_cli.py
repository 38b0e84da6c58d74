"""`eldr dashboards push`: Grafana dashboards from their JSON files, into a folder of their own."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

TOKEN_ENV = "GRAFANA_TOKEN"
FOLDER_UID, FOLDER_TITLE = "eldr-serve", "Eldr Serve"
_SET_BY_GRAFANA = ("id", "version")


def add_cli(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the commands."""
    parser = subparsers.add_parser("dashboards", help="bring the Grafana dashboards to a server")
    nested = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    push = nested.add_parser(
        "push", help=f"create or update them; the token is taken from {TOKEN_ENV}"
    )
    push.add_argument("--url", required=True, help="of Grafana, such as http://127.0.0.1:3000")
    push.add_argument("--files", default="dashboards", help="folder of the JSON files")
    push.set_defaults(func=_push)


def _push(args: argparse.Namespace) -> int:
    boards = read_boards(Path(args.files))
    for title, what in push_boards(args.url, _token(), boards):
        print(f"{what:<9} {title}")
    return 0


def read_boards(folder: Path) -> list[dict[str, Any]]:
    """Dashboards of a folder, by file name.

    Raises:
        ValueError: there are none, or a file is none.
    """
    boards = []
    for path in sorted(folder.glob("*.json")):
        try:
            board = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as err:
            raise ValueError(f"{path} is not JSON: {err}") from err
        if not isinstance(board, dict) or not {"uid", "title", "panels"} <= board.keys():
            raise ValueError(f"{path} is no dashboard: it needs uid, title and panels")
        boards.append(board)
    if not boards:
        raise ValueError(f"no .json files in {folder}: give --files the folder of the dashboards")
    return boards


def push_boards(url: str, token: str, boards: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """Bring dashboards to Grafana; those that are there already in this form are left alone.

    Returns:
        Title of each, and "created", "updated" or "unchanged".

    Raises:
        ValueError: the URL is none.
        OSError: Grafana does not answer, or refuses; says what to do.
    """
    from grafana_client.api import GrafanaApi
    from grafana_client.client import GrafanaClientError, GrafanaException
    from niquests.exceptions import RequestException

    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.username:
        raise ValueError(
            f"--url must be http(s)://HOST[:PORT][/PATH] without a user, got "
            f"{parts._replace(netloc=parts.netloc.rpartition('@')[2]).geturl()!r}"
        )
    # The client puts "api" right behind the path.
    base = parts._replace(path=parts.path.rstrip("/") + "/").geturl()
    grafana: Any = GrafanaApi.from_url(base, credential=token)

    def found(get: Callable[[str], Any], uid: str) -> Any:
        try:
            return get(uid)
        except GrafanaClientError as err:
            if err.status_code == 404:
                return None
            raise

    try:
        try:
            health = grafana.client.GET("/health")
        except GrafanaClientError:
            health = None
        if not isinstance(health, dict) or "database" not in health:
            raise ConnectionError(f"what answers at {url} is no Grafana: check --url and its path")
        if found(grafana.folder.get_folder, FOLDER_UID) is None:
            grafana.folder.create_folder(FOLDER_TITLE, uid=FOLDER_UID)
        done = []
        for board in boards:
            there = found(grafana.dashboard.get_dashboard, board["uid"])
            if there is None:
                what = "created"
            elif _is_same(there, board):
                done.append((board["title"], "unchanged"))
                continue
            else:
                what = "updated"
            grafana.dashboard.update_dashboard(
                {
                    "dashboard": {**board, "id": None},
                    "folderUid": FOLDER_UID,
                    "overwrite": True,
                    "message": "eldr dashboards push",
                }
            )
            done.append((board["title"], what))
        return done
    except GrafanaException as err:
        raise PermissionError(_refusal(err, url)) from err
    except RequestException as err:
        raise ConnectionError(
            f"no Grafana answers at {url} ({type(err).__name__}): check --url, and that this "
            "machine reaches it"
        ) from err


def _is_same(there: dict[str, Any], board: dict[str, Any]) -> bool:
    """Whether Grafana holds this dashboard, in the folder."""
    held = {k: v for k, v in there["dashboard"].items() if k not in _SET_BY_GRAFANA}
    wanted = {k: v for k, v in board.items() if k not in _SET_BY_GRAFANA}
    return held == wanted and there.get("meta", {}).get("folderUid") == FOLDER_UID


def _refusal(err: Any, url: str) -> str:
    if err.status_code == 401:
        return f"Grafana at {url} does not know the token in {TOKEN_ENV}: make a new one"
    if err.status_code == 403:
        return (
            f"the token in {TOKEN_ENV} may not write dashboards at {url}: give its service account "
            f"the role Editor, or folders:create and dashboards:write ({err.message})"
        )
    return f"Grafana at {url} refused: {err.message}"


def _token() -> str:
    token = os.environ.get(TOKEN_ENV, "").strip()
    if not token:
        raise ValueError(
            f"{TOKEN_ENV} is not set: make a token of a service account with the role Editor "
            "(Administration, Service accounts) and put it there"
        )
    if not (token.isascii() and token.isprintable()) or " " in token:
        raise ValueError(f"{TOKEN_ENV} has characters that no token has")
    return token
