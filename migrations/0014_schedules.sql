-- Schedules: what is to be started when. Temporal fires them; these rows say what it is to have, and it is given that
-- again where it was lost.

CREATE TABLE schedules (
    schedule_id        text PRIMARY KEY,
    tenant_id          text NOT NULL REFERENCES tenants,
    description        text NOT NULL,
    agent_name         text NOT NULL,
    agent_version      int,                   -- null: whichever is the latest when it fires
    message            jsonb NOT NULL,        -- content, tool_choice, max_tool_rounds
    metadata           jsonb NOT NULL,
    timing             jsonb NOT NULL,        -- cron or every_s, time_zone, jitter_s, overlap, catchup_s
    complete_when_idle boolean NOT NULL,
    paused_at          timestamptz,
    deleted_at         timestamptz,
    revision           int NOT NULL DEFAULT 1,
    applied            int NOT NULL DEFAULT 0,  -- the revision that Temporal has
    created_at         timestamptz NOT NULL DEFAULT now(),
    updated_at         timestamptz NOT NULL DEFAULT now(),
    FOREIGN KEY (tenant_id, agent_name) REFERENCES agents
);
CREATE INDEX schedules_of_tenant ON schedules (tenant_id, schedule_id) WHERE deleted_at IS NULL;
CREATE INDEX schedules_to_apply ON schedules (schedule_id) WHERE applied < revision;

CREATE TABLE schedule_runs (
    schedule_id text NOT NULL REFERENCES schedules ON DELETE CASCADE,
    firing      text NOT NULL,                -- the id of the workflow that Temporal started
    tenant_id   text NOT NULL REFERENCES tenants,
    session_id  text,                         -- null: none was made
    error       text,
    created_at  timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (schedule_id, firing)
);
CREATE INDEX schedule_runs_in_order ON schedule_runs (schedule_id, created_at DESC, firing DESC);
