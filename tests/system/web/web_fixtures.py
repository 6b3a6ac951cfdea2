"""The HTTPS server as a fixture, by `pytest_plugins = ("web_fixtures",)`."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from web_server import WebServer, web_server

from maskfleet.system.web import ranges


@pytest.fixture(scope="session")
def https_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WebServer]:
    with web_server(tmp_path_factory.mktemp("web")) as server:
        yield server


@pytest.fixture
def web(https_server: WebServer, monkeypatch: pytest.MonkeyPatch) -> WebServer:
    """The server without files and faults; its authority is trusted, there is no proxy, and pauses are short."""
    for name in [name for name in os.environ if name.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("SSL_CERT_FILE", str(https_server.ca_file))
    monkeypatch.setattr(ranges, "BACK_OFF_S", 0.001)
    https_server.files, https_server.etags, https_server.asked = {}, {}, []
    https_server.fault = lambda asked: None
    return https_server
