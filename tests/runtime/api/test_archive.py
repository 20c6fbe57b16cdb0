"""Sessions as files: what goes out comes in again, and nothing else does."""

from __future__ import annotations

import hashlib
import io
import json
import tarfile

import pytest

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.sandbox]

TOOL = {
    "type": "http",
    "name": "weather",
    "description": "The weather.",
    "parameters": {"type": "object", "properties": {}},
    "url": "http://127.0.0.1:9/",
    "headers": {"Authorization": "Bearer top-secret-word"},
}


async def exported(house, session: str, **params) -> bytes:
    answer = await house.client.get(f"/v1/sessions/{session}/export", params=params)
    assert answer.status_code == 200, answer.text
    return answer.content


async def imported(house, archive: bytes, **headers):
    return await house.client.post("/v1/sessions/import", content=archive, headers=headers)


async def with_files(house, **config) -> str:
    session = await house.session(files={"a.txt": "one"}, **config)
    for name, data in (("b/c.bin", bytes(range(256))), ("holes", b"\0" * 70_000 + b"end")):
        done = await house.client.put(f"/v1/sessions/{session}/sandbox/files/{name}", content=data)
        assert done.json()["state"] == "done", done.text
    return session


def members(archive: bytes) -> dict[str, bytes]:
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        return {one.name: tar.extractfile(one).read() for one in tar}


def packed(parts: dict[str, bytes], *, honest: bool = True) -> bytes:
    """`honest`: the manifest is made anew."""
    if honest:
        told = [
            {"name": name, "size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
            for name, data in parts.items()
            if name != "manifest.json"
        ]
        parts = {**parts, "manifest.json": json.dumps({"format": 1, "members": told}).encode()}
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for name, data in parts.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return out.getvalue()


def altered(archive: bytes, name: str, change) -> bytes:
    parts = members(archive)
    return packed({**parts, name: change(parts[name])})


async def test_what_goes_out_comes_in_as_another_session_that_stands_where_the_first_one_stood(house):
    session = await with_files(house)
    archive = await exported(house, session)
    answer = await imported(house, archive)
    assert answer.status_code == 201, answer.text
    told = answer.json()
    assert (told["came_from"], told["state"], told["step"]) == (session, "idle", 2)
    assert told["id"] != session
    roots = [
        (await house.client.get(f"/v1/sessions/{one}/checkpoints")).json()["data"][-1]["workspace_root"]
        for one in (session, told["id"])
    ]
    assert roots[0] == roots[1]
    read = await house.client.get(f"/v1/sessions/{told['id']}/sandbox/files/holes")
    assert read.content == b"\0" * 70_000 + b"end"
    ran = await house.client.post(f"/v1/sessions/{told['id']}/sandbox/exec", json={"command": "cat a.txt"})
    assert ran.json()["output"] == "one"
    assert await house.db.fetch("SELECT 1 FROM errand_parts") == []


async def test_a_step_that_says_how_many_calls_it_ran_goes_out_too(house):
    session = await with_files(house)
    await house.db.execute(
        "UPDATE steps SET output = coalesce(output, '{}'::jsonb) || '{\"calls\": 2}' WHERE session_id = $1", session
    )
    steps = members(await exported(house, session))["steps.jsonl"].splitlines()
    assert {json.loads(step)["output"]["calls"] for step in steps} == {2}


async def test_with_all_snapshots_it_can_be_taken_back_to_earlier_ones(house):
    session = await with_files(house)
    made = (await imported(house, await exported(house, session, snapshots="all"))).json()
    listed = await house.client.get(f"/v1/sessions/{made['id']}/sandbox/files", params={"step": 1})
    assert [one["path"] for one in listed.json()["data"]] == ["a.txt", "b"]
    forked = await house.client.post(f"/v1/sessions/{made['id']}/fork", json={"step": 1})
    assert forked.status_code == 201


async def test_a_key_imports_once(house):
    archive = await exported(house, await with_files(house))
    first, again = [await imported(house, archive, **{"Idempotency-Key": "import-once"}) for _ in range(2)]
    assert first.json()["id"] == again.json()["id"]
    other = await imported(house, archive + bytes(512), **{"Idempotency-Key": "import-once"})
    assert other.status_code == 409


async def test_a_secret_is_in_no_archive_and_the_import_says_which_it_lacks(house):
    egress = house.app.state.egress
    house.app.state.egress = type(egress)(__import__("sandbox.allow").allow.parse_allow("127.0.0.1:9"))
    try:
        session = await with_files(house, tools=[TOOL])
        archive = await exported(house, session)
        assert b"top-secret-word" not in archive
        made = await imported(house, archive)
    finally:
        house.app.state.egress = egress
    assert made.json()["secrets"] == ["tools.weather.headers.Authorization"]
    refused = await imported(house, archive)
    assert refused.json()["error"]["code"] == "host_not_allowed"


async def test_an_archive_of_another_model_is_refused_by_name(house):
    archive = await exported(house, await with_files(house))
    told = json.loads(members(archive)["session.json"])
    told["model"]["fingerprint"] = "g"
    other = altered(archive, "session.json", lambda _: json.dumps(told).encode())
    answer = await imported(house, other)
    assert (answer.status_code, answer.json()["error"]["code"]) == (409, "model_not_served")
    assert "'g'" in answer.json()["detail"]


def _twice(text: bytes) -> bytes:
    return text + text.splitlines()[-1] + b"\n"


def _digits(archive: bytes) -> bytes:
    """After the first member a header that says more of the next one, and takes hours to be searched."""
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        at = tar.getmembers()[1].offset
    info = tarfile.TarInfo("more")
    info.type, info.size = tarfile.XHDTYPE, 4 << 20
    return archive[:at] + info.tobuf(tarfile.USTAR_FORMAT) + b"1" * info.size + archive[at:]


BROKEN = {
    "a header of digits": _digits,
    "cut off": lambda archive: archive[: len(archive) // 2],
    "nothing": lambda _: b"",
    "no tar": lambda _: b"x" * 5000,
    "packed by gzip": lambda archive: __import__("gzip").compress(archive),
    "a bit": lambda archive: archive[:-3000] + bytes([archive[-3000] ^ 1]) + archive[-2999:],
    "no manifest": lambda archive: packed(
        {name: data for name, data in members(archive).items() if name != "manifest.json"}, honest=False
    ),
    "a member more": lambda archive: packed({**members(archive), "../evil": b"x"}),
    "an absolute one": lambda archive: packed({**members(archive), "/etc/x": b"x"}),
    "a blob of another name": lambda archive: packed({**members(archive), f"blobs/{'0' * 64}": b"x"}),
    "no workspace": lambda archive: packed(
        {name: data for name, data in members(archive).items() if not name.startswith("blobs/")}
    ),
    "a step twice": lambda archive: altered(archive, "steps.jsonl", _twice),
    "a text for a number": lambda archive: altered(
        archive, "checkpoints.jsonl", lambda text: text.replace(b'"tokens":0', b'"tokens":"0"')
    ),
    "other tokens": lambda archive: altered(
        archive, "checkpoints.jsonl", lambda text: text.replace(b'"tokens":0', b'"tokens":5')
    ),
    "no JSON": lambda archive: altered(archive, "steps.jsonl", lambda text: text + b"{\n"),
    "deep JSON": lambda archive: altered(archive, "steps.jsonl", lambda text: b"[" * 100_000),
    "no checkpoint": lambda archive: altered(archive, "checkpoints.jsonl", lambda _: b""),
    "a format of the future": lambda archive: packed(
        {
            **members(archive),
            "manifest.json": members(archive)["manifest.json"].replace(b'"format":1', b'"format":2'),
        },
        honest=False,
    ),
    "an unknown tool": lambda archive: altered(
        archive, "session.json", lambda text: text.replace(b'"tools":[]', b'"tools":["rm"]')
    ),
}


@pytest.mark.parametrize("how", BROKEN)
async def test_a_broken_archive_is_refused_in_a_sentence_and_nothing_is_made(house, how):
    archive = await exported(house, await with_files(house))
    before = await house.db.fetch("SELECT session_id FROM sessions")
    answer = await imported(house, BROKEN[how](archive))
    assert answer.status_code == 400, (how, answer.text)
    assert len(answer.json()["detail"]) > 20
    assert await house.db.fetch("SELECT session_id FROM sessions") == before
    assert await house.db.fetch("SELECT 1 FROM errand_parts") == []


async def test_links_and_folders_that_multiply_are_refused(house):
    archive = await exported(house, await with_files(house))
    parts = members(archive)
    link = io.BytesIO()
    with tarfile.open(fileobj=link, mode="w") as tar:
        info = tarfile.TarInfo("session.json")
        info.size = len(parts["session.json"])
        tar.addfile(info, io.BytesIO(parts["session.json"]))
        hard = tarfile.TarInfo("steps.jsonl")
        hard.type, hard.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(hard)
    assert (await imported(house, link.getvalue())).status_code == 400
    blob = json.dumps([]).encode()
    for _ in range(40):  # 2^40 entries of forty blobs
        digest = hashlib.sha256(blob).hexdigest()
        parts[f"blobs/{digest}"] = blob
        blob = json.dumps([["a", "d", 0o755, digest], ["b", "d", 0o755, digest]]).encode()
    root = hashlib.sha256(blob).hexdigest()
    parts[f"blobs/{root}"] = blob
    last = json.loads(parts["checkpoints.jsonl"].splitlines()[-1])
    rows = [*parts["checkpoints.jsonl"].splitlines()[:-1], json.dumps({**last, "workspace_root": root}).encode()]
    parts["checkpoints.jsonl"] = b"\n".join(rows)
    refused = await imported(house, packed(parts))
    assert refused.status_code == 400
    assert "too many files" in refused.json()["detail"]


async def test_a_blob_that_only_somebody_else_has_is_not_given_out(house):
    mine, theirs = await with_files(house), await house.session(files={"secret.txt": "theirs"})
    await house.client.put(f"/v1/sessions/{theirs}/sandbox/files/x", content=b"x")
    root = (await house.client.get(f"/v1/sessions/{theirs}/checkpoints")).json()["data"][-1]["workspace_root"]
    archive = await exported(house, mine)

    def pointing(text: bytes) -> bytes:
        rows = [json.loads(line) for line in text.splitlines()]
        rows[-1]["workspace_root"] = root
        return b"\n".join(json.dumps(row).encode() for row in rows)

    refused = await imported(house, altered(archive, "checkpoints.jsonl", pointing))
    assert refused.status_code == 400


async def test_another_tenant_exports_nothing(house):
    session = await with_files(house)
    assert (await house.other.get(f"/v1/sessions/{session}/export")).status_code == 404
