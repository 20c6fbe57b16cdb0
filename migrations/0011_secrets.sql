-- Secrets of tenants: written, used by tools, never shown. `sealed` is AES-256-GCM under a key that is not in here; its
-- associated data are tenant and name, so that a row moved elsewhere opens nothing.

CREATE TABLE secrets (
    tenant_id    text NOT NULL REFERENCES tenants,
    name         text NOT NULL CHECK (name ~ '^[A-Za-z_][A-Za-z0-9_]{0,62}$'),
    sealed       text NOT NULL,
    key_id       text NOT NULL,           -- of the key that sealed it
    created_at   timestamptz NOT NULL DEFAULT now(),
    updated_at   timestamptz NOT NULL DEFAULT now(),
    last_used_at timestamptz,             -- to the minute
    PRIMARY KEY (tenant_id, name)
);
