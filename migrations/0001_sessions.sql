-- The record of every session. A thing is accepted when its row commits here; everything else (Temporal, the
-- engine, sandboxes) can be lost and rebuilt from these tables. Tables of the installation itself (nodes) have
-- no tenant; every other table names one.

CREATE TABLE tenants (
    tenant_id   text PRIMARY KEY,
    salt        bytea NOT NULL CHECK (octet_length(salt) = 32),   -- random; part of every KV page key
    created_at  timestamptz NOT NULL DEFAULT now()
);

CREATE TABLE api_keys (
    key_id      text PRIMARY KEY,
    tenant_id   text NOT NULL REFERENCES tenants,
    sha256      bytea NOT NULL UNIQUE,
    scope       text NOT NULL CHECK (scope IN ('use', 'admin')),
    created_at  timestamptz NOT NULL DEFAULT now(),
    revoked_at  timestamptz
);

CREATE TABLE nodes (
    node_id      text PRIMARY KEY,
    boot         text NOT NULL,
    queue        text NOT NULL,
    card         jsonb NOT NULL,          -- the model card its engine gave
    sandbox      jsonb NOT NULL,          -- the sandbox driver and what it enforces
    heartbeat_at timestamptz NOT NULL DEFAULT now()
);

-- Allowed moves of the state machine; workflows/states.py is the source and a test compares the two.
CREATE TABLE session_transitions (
    from_state text NOT NULL,
    to_state   text NOT NULL,
    PRIMARY KEY (from_state, to_state)
);
INSERT INTO session_transitions (from_state, to_state) VALUES
    ('created', 'provisioning'), ('created', 'cancelling'),
    ('provisioning', 'idle'), ('provisioning', 'thinking'), ('provisioning', 'tool_running'),
    ('provisioning', 'failed'), ('provisioning', 'cancelling'),
    ('idle', 'thinking'), ('idle', 'paused'), ('idle', 'failed'), ('idle', 'cancelling'), ('idle', 'completed'),
    ('thinking', 'tool_running'), ('thinking', 'idle'), ('thinking', 'waiting'), ('thinking', 'paused'),
    ('thinking', 'failed'), ('thinking', 'cancelling'),
    ('tool_running', 'thinking'), ('tool_running', 'idle'), ('tool_running', 'waiting'), ('tool_running', 'paused'),
    ('tool_running', 'failed'), ('tool_running', 'cancelling'),
    ('waiting', 'thinking'), ('waiting', 'tool_running'), ('waiting', 'idle'), ('waiting', 'paused'),
    ('waiting', 'failed'), ('waiting', 'cancelling'),
    ('paused', 'idle'), ('paused', 'thinking'), ('paused', 'tool_running'), ('paused', 'waiting'), ('paused', 'cancelling'),
    ('failed', 'idle'), ('failed', 'thinking'), ('failed', 'tool_running'), ('failed', 'cancelling'),
    ('cancelling', 'cancelled');

CREATE TABLE sessions (
    session_id  text PRIMARY KEY,
    tenant_id   text NOT NULL REFERENCES tenants,
    state       text NOT NULL DEFAULT 'created' CHECK (state IN (
                    'created', 'provisioning', 'idle', 'thinking', 'tool_running', 'waiting', 'paused',
                    'failed', 'cancelling', 'cancelled', 'completed')),
    waiting_for text CHECK (waiting_for IN ('approval', 'outcome', 'client_tool', 'budget')),
    config      jsonb NOT NULL,           -- model, system, tools, files, limits, sampling, kv: frozen at creation
    seed        bigint NOT NULL,
    epoch       bigint NOT NULL DEFAULT 0,
    next_pos    bigint NOT NULL DEFAULT 1,
    node_id     text,
    node_boot   text,
    error       jsonb,
    created_at  timestamptz NOT NULL DEFAULT now(),
    updated_at  timestamptz NOT NULL DEFAULT now(),
    CHECK ((waiting_for IS NOT NULL) = (state = 'waiting'))
);
CREATE INDEX sessions_by_tenant ON sessions (tenant_id, created_at DESC, session_id);
CREATE INDEX sessions_open ON sessions (updated_at) WHERE state NOT IN ('cancelled', 'completed');

CREATE FUNCTION guard_session_state() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF NEW.state <> OLD.state AND NOT EXISTS (
        SELECT FROM session_transitions WHERE from_state = OLD.state AND to_state = NEW.state) THEN
        RAISE EXCEPTION 'session % cannot go from % to %', OLD.session_id, OLD.state, NEW.state
            USING ERRCODE = 'check_violation';
    END IF;
    IF NEW.epoch < OLD.epoch THEN
        RAISE EXCEPTION 'epoch of session % cannot fall from % to %', OLD.session_id, OLD.epoch, NEW.epoch
            USING ERRCODE = 'check_violation';
    END IF;
    RETURN NEW;
END $$;
CREATE TRIGGER guard_session_state BEFORE UPDATE ON sessions FOR EACH ROW EXECUTE FUNCTION guard_session_state();

CREATE TABLE messages (
    message_id  text PRIMARY KEY,
    tenant_id   text NOT NULL REFERENCES tenants,
    session_id  text NOT NULL REFERENCES sessions,
    seq         bigint GENERATED ALWAYS AS IDENTITY,
    content     text NOT NULL,
    options     jsonb NOT NULL,           -- tool_choice, max_tool_rounds
    state       text NOT NULL DEFAULT 'accepted' CHECK (state IN ('accepted', 'consumed')),
    created_at  timestamptz NOT NULL DEFAULT now()
);
CREATE INDEX messages_unconsumed ON messages (session_id, seq) WHERE state = 'accepted';

CREATE TABLE steps (
    session_id   text NOT NULL REFERENCES sessions,
    step_no      int NOT NULL CHECK (step_no >= 1),
    tenant_id    text NOT NULL REFERENCES tenants,
    parent_no    int,                     -- the step whose checkpoint this one starts from
    kind         text NOT NULL CHECK (kind IN ('input', 'think', 'tool', 'decision')),
    state        text NOT NULL CHECK (state IN ('running', 'completed', 'failed', 'cancelled')),
    token_start  int NOT NULL,            -- transcript position of its first token
    token_count  int NOT NULL DEFAULT 0,
    attempts     int NOT NULL DEFAULT 0,
    message_id   text REFERENCES messages,
    output       jsonb,
    error        jsonb,
    started_at   timestamptz NOT NULL DEFAULT now(),
    ended_at     timestamptz,
    PRIMARY KEY (session_id, step_no),
    CHECK (kind <> 'input' OR message_id IS NOT NULL)
);
CREATE UNIQUE INDEX one_input_per_message ON steps (message_id) WHERE message_id IS NOT NULL;
CREATE UNIQUE INDEX one_running_step ON steps (session_id) WHERE state = 'running';

CREATE TABLE attempts (
    session_id    text NOT NULL,
    step_no       int NOT NULL,
    attempt_no    int NOT NULL,
    tenant_id     text NOT NULL REFERENCES tenants,
    token         text NOT NULL,          -- names one execution of an activity, so that a repeated write is seen
    epoch         bigint NOT NULL,
    node_id       text NOT NULL,
    node_boot     text NOT NULL,
    resumed_at    int NOT NULL,           -- durable tokens of the step when the attempt began
    outcome       text NOT NULL DEFAULT 'running'
                  CHECK (outcome IN ('running', 'completed', 'failed', 'lost', 'cancelled')),
    error         jsonb,
    started_at    timestamptz NOT NULL DEFAULT now(),
    ended_at      timestamptz,
    PRIMARY KEY (session_id, step_no, attempt_no),
    FOREIGN KEY (session_id, step_no) REFERENCES steps,
    UNIQUE (session_id, step_no, token)
);

-- The transcript: token ids are the truth, text is derived. Appended only.
CREATE TABLE segments (
    session_id  text NOT NULL,
    step_no     int NOT NULL,
    idx         int NOT NULL,
    tenant_id   text NOT NULL REFERENCES tenants,
    kind        text NOT NULL CHECK (kind IN ('scaffold', 'message', 'model', 'tool')),
    token_ids   int[] NOT NULL,
    PRIMARY KEY (session_id, step_no, idx),
    FOREIGN KEY (session_id, step_no) REFERENCES steps
);

CREATE TABLE events (
    session_id  text NOT NULL REFERENCES sessions,
    pos         bigint NOT NULL,
    tenant_id   text NOT NULL REFERENCES tenants,
    type        text NOT NULL,
    step_no     int,
    attempt_no  int,
    data        jsonb NOT NULL,
    created_at  timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (session_id, pos)
);

CREATE TABLE checkpoints (
    session_id     text NOT NULL,
    step_no        int NOT NULL,
    tenant_id      text NOT NULL REFERENCES tenants,
    token_count    int NOT NULL,          -- transcript position
    token_digest   bytea NOT NULL,        -- sha256 over the transcript's token ids
    seed           bigint NOT NULL,
    sampler_pos    int NOT NULL,          -- the counter of the noise: the next token's position
    fingerprint    text NOT NULL,         -- model, layout, backend and mode of the pages
    kv_group       int NOT NULL,
    kv_shard       int NOT NULL,
    kv_shards      int NOT NULL,
    kv_tail        bytea,                 -- key of the last page; it commits to every page before it
    kv_new         bytea[] NOT NULL,      -- keys of the pages that this step added
    ledger_pos     int NOT NULL,          -- tool calls settled so far
    workspace_root text NOT NULL,
    created_at     timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (session_id, step_no),
    FOREIGN KEY (session_id, step_no) REFERENCES steps
);
CREATE FUNCTION refuse_change() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION '% rows are immutable', TG_TABLE_NAME USING ERRCODE = 'check_violation';
END $$;
CREATE TRIGGER checkpoints_are_immutable BEFORE UPDATE ON checkpoints FOR EACH ROW EXECUTE FUNCTION refuse_change();
CREATE TRIGGER segments_are_immutable BEFORE UPDATE ON segments FOR EACH ROW EXECUTE FUNCTION refuse_change();
CREATE TRIGGER events_are_immutable BEFORE UPDATE ON events FOR EACH ROW EXECUTE FUNCTION refuse_change();

CREATE TABLE tool_calls (
    session_id      text NOT NULL,
    step_no         int NOT NULL,
    call_no         int NOT NULL,
    tenant_id       text NOT NULL REFERENCES tenants,
    name            text NOT NULL,
    arguments       jsonb NOT NULL,
    argument_digest bytea NOT NULL,
    effect          text NOT NULL CHECK (effect IN ('pure', 'sandboxed', 'idempotent', 'unsafe')),
    status          text NOT NULL DEFAULT 'pending' CHECK (status IN ('pending', 'settled', 'outcome_unknown')),
    fence           bigint NOT NULL,      -- the epoch that claimed it
    owner           text NOT NULL,
    lease_until     timestamptz NOT NULL,
    runs            int NOT NULL DEFAULT 0,
    sandbox_id      text,                 -- where its last run began; only that sandbox's journal knows of it
    snapshot_before text NOT NULL,
    snapshot_after  text,
    result          jsonb,
    output          bytea,                -- what the tool printed, capped at its source
    created_at      timestamptz NOT NULL DEFAULT now(),
    settled_at      timestamptz,
    PRIMARY KEY (session_id, step_no, call_no),
    FOREIGN KEY (session_id, step_no) REFERENCES steps,
    CHECK ((status = 'settled') = (result IS NOT NULL))
);

CREATE TABLE sandboxes (
    sandbox_id  text PRIMARY KEY,
    tenant_id   text NOT NULL REFERENCES tenants,
    session_id  text NOT NULL REFERENCES sessions,
    node_id     text NOT NULL,
    driver      text NOT NULL,
    state       text NOT NULL CHECK (state IN ('creating', 'live', 'released')),
    handle      jsonb,
    created_at  timestamptz NOT NULL DEFAULT now(),
    released_at timestamptz
);
CREATE UNIQUE INDEX one_live_sandbox ON sandboxes (session_id) WHERE state <> 'released';

CREATE TABLE kv_residency (               -- a hint; what a tier really holds is verified on load
    session_id  text PRIMARY KEY REFERENCES sessions,
    tenant_id   text NOT NULL REFERENCES tenants,
    tier        text NOT NULL CHECK (tier IN ('none', 'device', 'host', 'nvme')),
    detail      jsonb NOT NULL,
    updated_at  timestamptz NOT NULL DEFAULT now()
);

CREATE TABLE idempotency (
    tenant_id   text NOT NULL REFERENCES tenants,
    key         text NOT NULL,
    route       text NOT NULL,
    body_sha256 bytea NOT NULL,
    response    jsonb NOT NULL,
    created_at  timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (tenant_id, key)
);
