from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import pytest

from kvtier import S3Place
from tests.kvtier.s3 import s3_server

_NUMBERS = itertools.count()


@pytest.fixture(scope="session")
def s3_url() -> Iterator[str]:
    with s3_server() as url:
        yield url


@pytest.fixture
def new_bucket(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[[], S3Place]:
    """Makes an empty bucket in the server, which is started by the first test that needs one."""

    def make() -> S3Place:
        import boto3

        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
        url = request.getfixturevalue("s3_url")
        name = f"bucket-{next(_NUMBERS)}"
        client = boto3.client("s3", endpoint_url=url, region_name="us-east-1")
        client.create_bucket(Bucket=name)
        client.close()
        return S3Place(name, endpoint_url=url, timeout_s=5)

    return make
