-- What was used, kept when the record of its session is removed. Written by triggers, so that whatever ends a step, a
-- sandbox or a stay of pages in a tier is counted in its own transaction, once. What is not known is null.

CREATE TABLE usage (
    session_id  text NOT NULL,
    step_no     int NOT NULL,
    attempt_no  int NOT NULL,             -- the one with which the step settled; after a retry it may settle again
    tenant_id   text NOT NULL REFERENCES tenants,
    model       text NOT NULL,
    kind        text NOT NULL,
    settled_at  timestamptz NOT NULL DEFAULT now(),
    sampled     bigint NOT NULL,          -- tokens
    device      bigint,                   -- tokens of the prompt by where their KV was: these four had it,
    host        bigint,
    nvme        bigint,
    shared      bigint,
    recomputed  bigint,                   -- these had it once and were prefilled again,
    computed    bigint,                   -- and these were new
    prefill_ms  double precision,
    engine_ms   double precision,         -- from its first turn in the engine to its last token
    tool_ms     bigint NOT NULL,
    PRIMARY KEY (session_id, step_no, attempt_no)
);
CREATE INDEX usage_of_tenant ON usage (tenant_id, settled_at) INCLUDE (sampled, recomputed, computed);
CREATE INDEX usage_by_time ON usage (settled_at);

-- What lasts: a sandbox that lives, pages that lie in a tier. An interval without an end goes on.
CREATE TABLE usage_intervals (
    interval_id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    tenant_id   text NOT NULL REFERENCES tenants,
    session_id  text NOT NULL,
    model       text NOT NULL,
    kind        text NOT NULL CHECK (kind IN ('sandbox', 'tier')),
    name        text NOT NULL,            -- the sandbox, or the tier
    bytes       bigint,                   -- in the tier; null: not known
    begun_at    timestamptz NOT NULL,
    ended_at    timestamptz
);
CREATE UNIQUE INDEX one_open_interval ON usage_intervals (session_id, kind, name) WHERE ended_at IS NULL;
CREATE INDEX usage_intervals_of_tenant ON usage_intervals (tenant_id, begun_at);

CREATE FUNCTION note_step_usage() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
    kv      jsonb := NEW.output -> 'kv';
    tokens  bigint;
    took_ms bigint;
    before  record;
BEGIN
    SELECT coalesce(sum(cardinality(token_ids)), 0) INTO tokens FROM segments
        WHERE session_id = NEW.session_id AND step_no = NEW.step_no AND kind = 'model';
    IF NEW.kind = 'compaction' THEN
        tokens := coalesce((NEW.output ->> 'sampled')::bigint, 0);
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
CREATE TRIGGER note_step_usage AFTER UPDATE OF state ON steps FOR EACH ROW
    WHEN (OLD.state = 'running' AND NEW.state <> 'running') EXECUTE FUNCTION note_step_usage();

CREATE FUNCTION note_sandbox_usage() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF NEW.state = 'live' THEN
        INSERT INTO usage_intervals (tenant_id, session_id, model, kind, name, begun_at)
        SELECT NEW.tenant_id, NEW.session_id, config ->> 'model', 'sandbox', NEW.sandbox_id, now()
        FROM sessions WHERE session_id = NEW.session_id ON CONFLICT DO NOTHING;
    ELSIF NEW.state = 'released' THEN
        UPDATE usage_intervals SET ended_at = now()
        WHERE session_id = NEW.session_id AND kind = 'sandbox' AND name = NEW.sandbox_id AND ended_at IS NULL;
    END IF;
    RETURN NULL;
END $$;
CREATE TRIGGER note_sandbox_usage AFTER UPDATE OF state ON sandboxes FOR EACH ROW
    WHEN (OLD.state <> NEW.state) EXECUTE FUNCTION note_sandbox_usage();

CREATE FUNCTION note_tier_usage() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
    held bigint := (NEW.detail ->> 'held_bytes')::bigint;
BEGIN
    UPDATE usage_intervals SET ended_at = now() WHERE session_id = NEW.session_id AND kind = 'tier'
        AND ended_at IS NULL AND (name <> NEW.tier OR bytes IS DISTINCT FROM held);
    IF NEW.tier IN ('host', 'nvme', 'shared') THEN
        INSERT INTO usage_intervals (tenant_id, session_id, model, kind, name, bytes, begun_at)
        SELECT NEW.tenant_id, NEW.session_id, config ->> 'model', 'tier', NEW.tier, held, now()
        FROM sessions WHERE session_id = NEW.session_id ON CONFLICT DO NOTHING;
    END IF;
    RETURN NULL;
END $$;
CREATE TRIGGER note_tier_usage AFTER INSERT OR UPDATE ON kv_residency FOR EACH ROW EXECUTE FUNCTION note_tier_usage();

-- A session that ends holds nothing any more.
CREATE FUNCTION end_usage() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    UPDATE usage_intervals SET ended_at = now() WHERE session_id = NEW.session_id AND ended_at IS NULL;
    RETURN NULL;
END $$;
CREATE TRIGGER end_usage AFTER UPDATE OF state ON sessions FOR EACH ROW
    WHEN (OLD.state <> NEW.state AND NEW.state IN ('cancelled', 'completed')) EXECUTE FUNCTION end_usage();
