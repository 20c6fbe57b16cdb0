-- Agents: what sessions are made of, under a name, in versions that never change. Beside them, what a session says of
-- where it came from and what its owner notes of it.

CREATE TABLE agents (
    tenant_id   text NOT NULL REFERENCES tenants,
    name        text NOT NULL CHECK (name ~ '^[A-Za-z0-9][A-Za-z0-9_.-]{0,62}$'),
    latest      int NOT NULL,
    created_at  timestamptz NOT NULL DEFAULT now(),
    updated_at  timestamptz NOT NULL DEFAULT now(),
    archived_at timestamptz,              -- no new sessions from then on
    PRIMARY KEY (tenant_id, name)
);

CREATE TABLE agent_versions (
    tenant_id   text NOT NULL,
    name        text NOT NULL,
    version     int NOT NULL CHECK (version >= 1),
    version_id  text NOT NULL UNIQUE,     -- of the request that made it
    config      jsonb NOT NULL,           -- as a session's; values of tools are sealed, the model may be empty
    digest      bytea NOT NULL,           -- keyed, of the whole content: the same content makes no other version
    description text NOT NULL,
    metadata    jsonb NOT NULL,
    created_at  timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (tenant_id, name, version),
    FOREIGN KEY (tenant_id, name) REFERENCES agents
);
CREATE TRIGGER agent_versions_are_immutable BEFORE UPDATE ON agent_versions
    FOR EACH ROW EXECUTE FUNCTION refuse_change();

ALTER TABLE sessions
    ADD COLUMN agent_name    text,
    ADD COLUMN agent_version int,
    ADD COLUMN metadata      jsonb NOT NULL DEFAULT '{}',
    ADD COLUMN schedule_id   text;
CREATE INDEX sessions_of_agent ON sessions (tenant_id, agent_name, created_at DESC) WHERE agent_name IS NOT NULL;
CREATE INDEX sessions_of_schedule ON sessions (schedule_id, created_at DESC) WHERE schedule_id IS NOT NULL;
