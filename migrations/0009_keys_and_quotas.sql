-- Who may call, and how much: keys with names, ends and rates, tenants that can be disabled and have quotas, and the
-- log of what operators did. A null limit is none.

ALTER TABLE tenants
    ADD COLUMN disabled_at    timestamptz,
    ADD COLUMN open_sessions  int CHECK (open_sessions >= 0),
    ADD COLUMN tokens_per_day bigint CHECK (tokens_per_day >= 0),       -- sampled and prefilled, of a day in UTC
    ADD COLUMN disk_bytes     bigint CHECK (disk_bytes >= 0),           -- workspaces of open sessions, by their limits
    ADD COLUMN sandboxes      int CHECK (sandboxes >= 1);               -- at once

ALTER TABLE api_keys
    ADD COLUMN name                text NOT NULL DEFAULT '',
    ADD COLUMN prefix              text NOT NULL DEFAULT '',            -- what may be shown of the key
    ADD COLUMN expires_at          timestamptz,
    ADD COLUMN last_used_at        timestamptz,                         -- to the minute
    ADD COLUMN requests_per_minute int CHECK (requests_per_minute >= 1),
    ADD COLUMN rotated_to          text REFERENCES api_keys;
CREATE INDEX api_keys_of_tenant ON api_keys (tenant_id, created_at DESC, key_id);

-- The token bucket of a key that has a rate: what was in it, and when. After a crash of the server every one is full.
CREATE UNLOGGED TABLE rate_buckets (
    key_id      text PRIMARY KEY REFERENCES api_keys,
    tenant_id   text NOT NULL REFERENCES tenants,
    level       double precision NOT NULL,
    taken       boolean NOT NULL,                                       -- whether the last request got one
    filled_at   timestamptz NOT NULL
) WITH (fillfactor = 50);

CREATE INDEX sessions_open_of_tenant ON sessions (tenant_id) WHERE state NOT IN ('cancelled', 'completed');
CREATE INDEX sandboxes_of_tenant ON sandboxes (tenant_id) WHERE state <> 'released';

-- Sessions whose tenant has all the sandboxes that it may have: they get one in the order in which they came.
CREATE TABLE sandbox_turns (
    session_id  text PRIMARY KEY REFERENCES sessions,
    tenant_id   text NOT NULL REFERENCES tenants,
    seq         bigint GENERATED ALWAYS AS IDENTITY,
    renewed_at  timestamptz NOT NULL DEFAULT now()                      -- whoever says nothing for a while has gone
);
CREATE INDEX sandbox_turns_of_tenant ON sandbox_turns (tenant_id, seq);

-- What operators changed. Appended only.
CREATE TABLE admin_actions (
    action_id   bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    tenant_id   text NOT NULL REFERENCES tenants,                       -- of the key
    key_id      text NOT NULL REFERENCES api_keys,
    action      text NOT NULL,
    target      text,
    request_id  text NOT NULL,
    outcome     text NOT NULL CHECK (outcome IN ('done', 'refused', 'failed')),
    detail      jsonb NOT NULL DEFAULT '{}',
    created_at  timestamptz NOT NULL DEFAULT clock_timestamp()
);
CREATE INDEX admin_actions_of_target ON admin_actions (target, action_id);
CREATE TRIGGER admin_actions_are_immutable BEFORE UPDATE OR DELETE ON admin_actions
    FOR EACH ROW EXECUTE FUNCTION refuse_change();
