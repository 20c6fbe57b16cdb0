"""Files and commands of a session from outside, over real sandboxes."""

from __future__ import annotations

import asyncio
import io
import tarfile

import pytest

from sandbox import BlobStore, Handle

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.sandbox]

FILES = {"notes.txt": "hello\n", "src/main.py": "print('hi')\n"}


def tar(*members: tuple[str, bytes]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return out.getvalue()


async def names(house, session: str, **params) -> list[str]:
    answer = await house.client.get(f"/v1/sessions/{session}/sandbox/files", params={"recursive": True, **params})
    assert answer.status_code == 200, answer.text
    return [one["path"] for one in answer.json()["data"]]


async def test_the_files_that_a_session_was_made_with_are_there_before_anything_runs(house):
    session = await house.session(files=FILES)
    assert await names(house, session) == ["notes.txt", "src", "src/main.py"]
    read = await house.client.get(f"/v1/sessions/{session}/sandbox/files/src/main.py")
    assert read.content == b"print('hi')\n"
    assert read.headers["content-disposition"].startswith("attachment")
    assert read.headers["x-content-type-options"] == "nosniff"


async def test_a_file_that_is_put_is_a_step_of_its_own_and_the_one_before_stays_as_it_was(house):
    session = await house.session(files=FILES)
    path = f"/v1/sessions/{session}/sandbox/files/notes.txt"
    first = (await house.client.put(path, content=b"one")).json()
    second = (await house.client.put(path, content=b"three", params={"mode": "0600"})).json()
    assert (first["state"], second["state"], second["step"]) == ("done", "done", first["step"] + 1)
    assert (await house.client.get(path)).content == b"three"
    assert (await house.client.get(path, params={"step": first["step"]})).content == b"one"
    diff = await house.client.get(
        f"/v1/sessions/{session}/sandbox/diff", params={"from": first["step"], "to": second["step"]}
    )
    assert [(one["path"], one["change"], one["size_before"], one["size"]) for one in diff.json()["data"]] == [
        ("notes.txt", "changed", 3, 5)
    ]
    kinds = [step["kind"] for step in (await house.client.get(f"/v1/sessions/{session}/steps")).json()["data"]]
    assert kinds == ["decision", "decision"]
    info = (await house.client.get(f"/v1/sessions/{session}")).json()
    assert info["state"] == "idle"
    assert (await house.events(session)).count("workspace.changed") == 2


async def test_a_put_with_a_key_takes_effect_once(house):
    session = await house.session()
    path, headers = f"/v1/sessions/{session}/sandbox/files/a", {"Idempotency-Key": session}
    answers = [await house.client.put(path, content=b"x", headers=headers) for _ in range(2)]
    assert answers[0].json() == answers[1].json()
    assert len((await house.client.get(f"/v1/sessions/{session}/checkpoints")).json()["data"]) == 1


async def test_a_removed_file_is_gone_and_one_that_is_none_is_not_found(house):
    session = await house.session(files=FILES)
    path = f"/v1/sessions/{session}/sandbox/files"
    assert (await house.client.delete(f"{path}/src")).json()["state"] == "done"
    assert await names(house, session) == ["notes.txt"]
    missing = await house.client.delete(f"{path}/src")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "not_found")
    assert (await house.client.get(f"{path}/src/main.py")).status_code == 404


@pytest.mark.parametrize("path", ["/etc/passwd", "a/../../b", "..", "a//b", "x/%2e/y", "a%00b", "n" * 300])
async def test_a_path_that_is_none_is_refused_at_the_edge(house, path):
    session = await house.session()
    before = f"/v1/sessions/{session}/sandbox/files/"
    put = await house.client.put(before + path.replace("..", "%2e%2e"), content=b"x")
    assert put.status_code == 400, put.text
    assert (await house.client.get(f"/v1/sessions/{session}/checkpoints")).json()["data"] == []


async def test_an_archive_is_put_over_what_is_there_and_a_hostile_one_changes_nothing(house):
    session = await house.session(files=FILES)
    path = f"/v1/sessions/{session}/sandbox/archive"
    done = (await house.client.post(path, content=tar(("src/main.py", b"new"), ("lib/a", b"a")))).json()
    assert (done["files"], done["size"]) == (2, 4)
    assert await names(house, session) == ["lib", "lib/a", "notes.txt", "src", "src/main.py"]
    for hostile in (tar(("../x", b"x")), tar(("/x", b"x")), b"no archive", tar(("notes.txt/x", b"x"))):
        refused = await house.client.post(path, content=hostile)
        assert refused.status_code == 400, refused.text
    assert len((await house.client.get(f"/v1/sessions/{session}/checkpoints")).json()["data"]) == 1


async def test_a_command_runs_in_the_sandbox_and_what_it_wrote_is_a_checkpoint(house):
    session = await house.session(files=FILES)
    body = {"command": "cat notes.txt; cat > out; echo gone >&2; exit 3", "stdin": "from outside"}
    ran = (await house.client.post(f"/v1/sessions/{session}/sandbox/exec", json=body)).json()
    assert (ran["exit"], ran["reason"], ran["output_truncated"]) == (3, "exit", False)
    assert sorted(ran["output"].split()) == ["gone", "hello"]
    read = await house.client.get(f"/v1/sessions/{session}/sandbox/files/out", params={"step": ran["step"]})
    assert read.content == b"from outside"
    again = await house.client.get(f"/v1/sessions/{session}/sandbox/exec/{ran['id']}")
    assert again.json() == ran
    events = await house.events(session)
    assert [kind for kind in events if kind.startswith(("exec.", "workspace."))] == [
        "exec.started",
        "exec.settled",
        "workspace.changed",
    ]


async def test_files_that_are_put_reach_a_sandbox_that_lives_and_what_runs_in_it_goes_on(house):
    session = await house.session()
    exec_path, files = f"/v1/sessions/{session}/sandbox/exec", f"/v1/sessions/{session}/sandbox/files"
    await house.client.post(exec_path, json={"command": "mkdir d; echo 1 > d/kept"})
    await house.client.put(f"{files}/d/given", content=b"2")
    ran = (await house.client.post(exec_path, json={"command": ["cat", "d/kept", "d/given"]})).json()
    assert ran["output"] == "1\n2"
    created = (await house.events(session)).count("sandbox.created")
    assert created == 1


async def test_a_command_that_runs_too_long_is_stopped_and_one_that_cannot_start_says_so(house):
    session = await house.session()
    path = f"/v1/sessions/{session}/sandbox/exec"
    late = (await house.client.post(path, json={"command": ["sleep", "60"], "timeout_s": 0.2})).json()
    assert (late["reason"], late["exit"]) == ("timeout", None)
    none = (await house.client.post(path, json={"command": ["no-such-program"]})).json()
    assert none["reason"] == "exit"
    assert none["exit"] != 0


async def test_a_command_whose_sandbox_is_lost_is_not_run_again(house):
    session = await house.session()
    path = f"/v1/sessions/{session}/sandbox/exec"
    await house.client.post(path, json={"command": ["true"]})
    asking = asyncio.create_task(house.client.post(path, json={"command": "echo x >> /work/ran; sleep 30"}))
    while "exec.started" not in (await house.events(session))[-3:]:
        await asyncio.sleep(0.05)
    row = await house.db.fetchrow("SELECT handle FROM sandboxes WHERE session_id = $1 AND state = 'live'", session)
    await house.services.driver.release(Handle.from_json(dict(row["handle"])))
    answer = (await asking).json()
    assert (answer["state"], answer["reason"], answer["exit"]) == ("done", "outcome_unknown", None)
    assert (await house.events(session)).count("exec.started") == 2  # of two commands


async def test_where_the_api_has_no_blobs_a_node_is_asked(house, tmp_path):
    session = await house.session(files=FILES)
    files = f"/v1/sessions/{session}/sandbox/files"
    await house.client.put(f"{files}/big", content=bytes(range(256)) * 4096 * 6 + b"end")
    before = {row["errand_id"] for row in await house.db.fetch("SELECT errand_id FROM errands")}  # others'
    near, house.app.state.blobs = house.app.state.blobs, BlobStore(tmp_path)
    try:
        assert await names(house, session) == ["big", "notes.txt", "src", "src/main.py"]
        assert (await house.client.get(f"{files}/big")).content.endswith(b"\xffend")
        assert (await house.client.get(f"{files}/none")).status_code == 404
        assert (await house.client.get(f"{files}/src")).status_code == 400
    finally:
        house.app.state.blobs = near
    assert {row["errand_id"] for row in await house.db.fetch("SELECT errand_id FROM errands")} <= before


async def test_another_tenant_sees_no_files_and_changes_none(house):
    session = await house.session(files=FILES)
    base = f"/v1/sessions/{session}/sandbox"
    answers = [
        await house.other.get(f"{base}/files"),
        await house.other.get(f"{base}/files/notes.txt"),
        await house.other.put(f"{base}/files/notes.txt", content=b"x"),
        await house.other.delete(f"{base}/files/notes.txt"),
        await house.other.post(f"{base}/archive", content=tar(("a", b""))),
        await house.other.post(f"{base}/exec", json={"command": "true"}),
        await house.other.get(f"{base}/diff", params={"from": 1}),
    ]
    assert [answer.status_code for answer in answers] == [404] * 7


async def test_a_session_that_works_is_left_alone(house):
    session = await house.session()
    await house.db.execute("UPDATE sessions SET state = 'provisioning' WHERE session_id = $1", session)
    await house.db.execute("UPDATE sessions SET state = 'thinking' WHERE session_id = $1", session)
    answer = await house.client.put(f"/v1/sessions/{session}/sandbox/files/a", content=b"x")
    assert answer.status_code == 409
    assert "while it rests" in answer.json()["detail"]


async def test_a_workspace_over_its_limit_is_refused_and_stays_as_it_was(house):
    session = await house.session(limits={"workspace_bytes": 1 << 20})
    files = f"/v1/sessions/{session}/sandbox/files"
    answer = await house.client.put(f"{files}/big", content=bytes(range(256)) * 4097)
    assert (answer.status_code, answer.json()["error"]["code"]) == (409, "workspace_full")
    assert await names(house, session) == []


async def test_no_blob_outlives_the_sessions_that_had_it(house):
    """Also of what came across on the way: the files that it was made with, archives, sandboxes as they were."""
    session = await house.session(files={"only-here.txt": "only here"})
    base = f"/v1/sessions/{session}/sandbox"
    await house.client.put(f"{base}/files/a", content=b"a of this test")
    await house.client.post(f"{base}/exec", json={"command": "echo drift > d; (sleep 0.1; echo later > d) & true"})
    await house.client.post(f"{base}/archive", content=tar(("x/y", b"y of this test")))
    await house.client.post(f"{base}/archive", content=tar(("a/y", b"refused")))
    await house.client.delete(f"{base}/files/x")
    await house.client.post(f"/v1/sessions/{session}/cancel", json={})
    while (await house.client.get(f"/v1/sessions/{session}")).json()["state"] != "cancelled":
        await asyncio.sleep(0.02)
    rows = await house.db.fetch("SELECT session_id FROM sessions WHERE state NOT IN ('cancelled', 'completed')")
    for row in rows:
        await house.client.post(f"/v1/sessions/{row['session_id']}/cancel", json={})
        while (await house.client.get(f"/v1/sessions/{row['session_id']}")).json()["state"] not in ("cancelled", None):
            if (await house.other.get(f"/v1/sessions/{row['session_id']}")).status_code == 200:
                break
            await asyncio.sleep(0.02)
    assert list(house.services.blobs) == []


async def test_a_key_that_was_used_for_another_mode_of_the_file_is_refused(house):
    session = await house.session()
    path, headers = f"/v1/sessions/{session}/sandbox/files/run.sh", {"Idempotency-Key": f"mode of {session}"}
    first, longer, other = [
        await house.client.put(path, content=b"#!/bin/sh\n", params=params, headers=headers)
        for params in ({"mode": "0644"}, {"mode": "0644", "wait_s": 30}, {"mode": "0755"})
    ]
    assert (first.status_code, longer.json()) == (200, first.json())
    assert (other.status_code, other.json()["error"]["code"]) == (409, "idempotency_mismatch")
