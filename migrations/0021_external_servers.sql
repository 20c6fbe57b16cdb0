-- Sessions whose model a server elsewhere runs: their KV is that server's, and so is the count of their tokens. What
-- their transcripts are made of are bytes, which are no tokens to anybody.

ALTER TABLE kv_residency DROP CONSTRAINT kv_residency_tier_check;
ALTER TABLE kv_residency ADD CONSTRAINT kv_residency_tier_check
    CHECK (tier IN ('device', 'host', 'nvme', 'shared', 'none', 'external'));

-- As in 0010, but for what was sampled: a step that is not exact says it itself, and of one that failed on a node in
-- front of a server, four bytes count as a token.
CREATE OR REPLACE FUNCTION note_step_usage() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
    kv      jsonb := NEW.output -> 'kv';
    tokens  bigint;
    took_ms bigint;
    before  record;
BEGIN
    SELECT coalesce(sum(cardinality(token_ids)), 0) INTO tokens FROM segments
        WHERE session_id = NEW.session_id AND step_no = NEW.step_no AND kind = 'model';
    IF NEW.kind = 'compaction' OR NEW.output ->> 'exact' = 'false' THEN
        tokens := coalesce((NEW.output ->> 'sampled')::bigint, 0);
    ELSIF NEW.kind = 'think' AND NEW.output IS NULL AND tokens > 0 AND EXISTS (
        SELECT FROM attempts a JOIN nodes n USING (node_id) WHERE a.session_id = NEW.session_id
            AND a.step_no = NEW.step_no AND a.attempt_no = NEW.attempts AND n.card ->> 'kv' = 'external'
    ) THEN
        tokens := (tokens + 3) / 4;
    END IF;
    SELECT coalesce(sum(greatest(0, extract(epoch FROM settled_at - started_at) * 1000))::bigint, 0) INTO took_ms
        FROM tool_calls WHERE session_id = NEW.session_id AND step_no = NEW.step_no AND status = 'settled'
        AND NOT result ? 'told';
    SELECT coalesce(sum(u.sampled), 0) AS sampled, coalesce(sum(u.tool_ms), 0) AS tool_ms INTO before FROM usage u
        WHERE u.session_id = NEW.session_id AND u.step_no = NEW.step_no;
    INSERT INTO usage (session_id, step_no, attempt_no, tenant_id, model, kind, sampled, device, host, nvme, shared,
        recomputed, computed, prefill_ms, engine_ms, tool_ms)
    SELECT NEW.session_id, NEW.step_no, NEW.attempts, NEW.tenant_id, s.config ->> 'model', NEW.kind,
        tokens - before.sampled, (kv ->> 'device')::bigint, (kv ->> 'host')::bigint, (kv ->> 'nvme')::bigint,
        (kv ->> 'shared')::bigint, (kv ->> 'recomputed')::bigint, (kv ->> 'computed')::bigint,
        (NEW.output ->> 'prefill_ms')::float8,
        (NEW.output ->> 'prefill_ms')::float8 + (NEW.output ->> 'decode_ms')::float8, took_ms - before.tool_ms
    FROM sessions s WHERE s.session_id = NEW.session_id
    ON CONFLICT DO NOTHING;
    RETURN NULL;
END $$;
