-- What is asked of a session's workspace from outside: commands that change it, and errands that read at a node.

ALTER TABLE commands
    DROP CONSTRAINT commands_verb_check,
    ADD CONSTRAINT commands_verb_check CHECK (verb IN (
        'pause', 'resume', 'retry', 'rewind', 'interrupt', 'answer', 'write', 'remove', 'unpack', 'exec')),
    ADD COLUMN body       bytea,                              -- the file, the archive, or what exec reads
    ADD COLUMN started_in text,                               -- the sandbox in which an exec was begun, before it was
    ADD COLUMN result     jsonb,
    ADD COLUMN output     bytea;                              -- what an exec printed, capped at its source

-- Something that only a node can do, since blobs and engines are its own. The row carries what is asked and what came
-- of it; Temporal carries its id.
CREATE TABLE errands (
    errand_id  text PRIMARY KEY,
    tenant_id  text NOT NULL REFERENCES tenants,
    session_id text REFERENCES sessions,                      -- null: about no session
    kind       text NOT NULL,
    request    jsonb NOT NULL,
    state      text NOT NULL DEFAULT 'asked' CHECK (state IN ('asked', 'done', 'refused')),
    result     jsonb,
    body       bytea,
    created_at timestamptz NOT NULL DEFAULT now(),
    done_at    timestamptz
);
CREATE INDEX errands_of_session ON errands (session_id) WHERE session_id IS NOT NULL;
CREATE INDEX errands_by_age ON errands (created_at);

-- A body that is too large for one row, as it came: before its errand is asked, and until that is done.
CREATE TABLE errand_parts (
    errand_id  text NOT NULL,
    part_no    int NOT NULL,
    tenant_id  text NOT NULL REFERENCES tenants,
    body       bytea NOT NULL,
    created_at timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (errand_id, part_no)
);
