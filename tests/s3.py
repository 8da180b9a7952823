"""A real S3 server for tests: moto's, in a process of its own, on a free port of 127.0.0.1.

A test module asks for it with `pytest_plugins = ["tests.s3"]` and the fixture `s3_url`.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from tasks.engines.ports import free_port

SECRET = "planted-secret-of-the-object-store"
"""The test server takes any; no log, manifest or message may repeat it."""


PROGRAM = """
import sys
from moto.s3.models import s3_backends
from moto.server import main
bucket = sys.argv.pop(1)
if bucket:
    s3_backends["123456789012"]["aws"].create_bucket(bucket, "us-east-1")
main()
"""


@contextmanager
def server(port: int, bucket: str = "") -> Iterator[str]:
    """`http://127.0.0.1:PORT`, with a bucket from its first answer on. It ends without memory."""
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, bucket, "-H", "127.0.0.1", "-p", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    address = f"http://127.0.0.1:{port}"
    try:
        _wait(address, process)
        yield address
    finally:
        process.kill()
        process.wait()


def _wait(address: str, process: subprocess.Popen[bytes]) -> None:
    for _ in range(600):
        if process.poll() is not None:
            raise RuntimeError(f"moto's server ended with {process.returncode}")
        try:
            httpx.get(f"{address}/moto-api/", timeout=2.0)
            return
        except httpx.HTTPError:
            time.sleep(0.1)
    raise RuntimeError("moto's server does not answer")


@pytest.fixture(scope="session")
def s3_server() -> Iterator[str]:
    with server(free_port()) as address:
        yield address


def credentials(address: str) -> dict[str, str]:
    """Environment of a client of the test server, and of no other."""
    return {
        "AWS_ENDPOINT_URL": address,
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_CONFIG_FILE": os.devnull,
        "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
    }


def client(address: str) -> Any:
    """To look at the server past our own code, and to damage what it holds."""
    import boto3

    return boto3.client(
        "s3",
        endpoint_url=address,
        aws_access_key_id="test",
        aws_secret_access_key=SECRET,
        region_name="us-east-1",
    )


@pytest.fixture
def s3_url(s3_server: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """`s3://BUCKET/store`, of a bucket that no other test sees; the client's variables are set."""
    use(monkeypatch, s3_server)
    bucket = f"test-{uuid.uuid4().hex[:12]}"
    client(s3_server).create_bucket(Bucket=bucket)
    yield f"s3://{bucket}/store"
    forget_clients()


def use(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    forget_clients()
    for name, value in credentials(address).items():
        monkeypatch.setenv(name, value)


def forget_clients() -> None:
    """fsspec keeps a client, with the address and the credentials that it began with."""
    from s3fs import S3FileSystem

    S3FileSystem.clear_instance_cache()
