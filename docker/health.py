#!/usr/bin/env python3
"""Asks the daemon in this container: `gdsstore-health [PATH]`, where PATH is /healthz (default) or /readyz.

Exit code 0: it answered 200. It runs inside the container, where the daemon answers on loopback, so that a probe needs no port that
others reach; one that answers on a single other address is asked there. Reads KV_HTTP and KV_HTTP_TOKEN_FILE.
"""

from __future__ import annotations

import http.client
import os
import sys
from pathlib import Path

DEADLINE_S = 4.0
ALL_ADDRESSES = ("", "0.0.0.0", "::")


def answer(host: str, port: int, path: str, token_file: str | None) -> tuple[int, str]:
    """The status and the text that the daemon answers. Raises OSError, and what http.client raises."""
    headers = {}
    if token_file:
        headers["Authorization"] = f"Bearer {Path(token_file).read_text(encoding='utf-8').strip()}"
    connection = http.client.HTTPConnection(host, port, timeout=DEADLINE_S)
    try:
        connection.request("GET", path, headers=headers)
        response = connection.getresponse()
        return response.status, response.read(4096).decode("utf-8", "replace").strip()
    finally:
        connection.close()


def main() -> int:
    path = sys.argv[1] if len(sys.argv) > 1 else "/healthz"
    host, _, port = os.environ.get("KV_HTTP", "127.0.0.1:9470").rpartition(":")
    host = host.strip("[]")
    if host in ALL_ADDRESSES:
        host = "127.0.0.1"
    try:
        status, text = answer(host, int(port), path, os.environ.get("KV_HTTP_TOKEN_FILE"))
    except (OSError, http.client.HTTPException, ValueError) as error:
        status, text = 0, str(error)
    sys.stdout.write(f"{path} on port {port}: {status or 'no answer'} {text}\n")
    return 0 if status == 200 else 1


if __name__ == "__main__":
    sys.exit(main())
