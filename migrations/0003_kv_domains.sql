-- Sharing domains: who may find whose pages. Sessions without one use their tenant's salt. A domain has a salt of its
-- own, from which its pages' keys and, where tiers are encrypted, their encryption key come; it ends with its last
-- session, and then nothing that was written under it can be found or read any more.

CREATE TABLE kv_domains (
    domain_id   text PRIMARY KEY,
    tenant_id   text NOT NULL REFERENCES tenants,
    salt        bytea NOT NULL CHECK (octet_length(salt) = 32),
    created_at  timestamptz NOT NULL DEFAULT now()
);

ALTER TABLE sessions ADD COLUMN kv_domain text REFERENCES kv_domains ON DELETE SET NULL;
CREATE INDEX sessions_of_domain ON sessions (kv_domain) WHERE kv_domain IS NOT NULL;
