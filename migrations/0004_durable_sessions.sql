-- Commands, questions, budgets, branches. Everything here has a default, so that the previous release's api can go on
-- serving beside it while nodes and workers are renewed.

ALTER TABLE sessions
    ADD COLUMN ending       text CHECK (ending IN ('cancelled', 'completed')),
    ADD COLUMN parent_id    text,                             -- forked from, or started by, this session
    ADD COLUMN parent_step  int,
    ADD COLUMN parent_call  int,                              -- of the tool step whose call this session is; null: a fork
    ADD COLUMN budget       jsonb,                            -- limits as raised since; null: those of the config
    ADD COLUMN warned       text[] NOT NULL DEFAULT '{}',     -- measures that were warned of at their present limit
    ADD COLUMN spent_tokens bigint NOT NULL DEFAULT 0,        -- sampled
    ADD COLUMN spent_steps  int NOT NULL DEFAULT 0,
    ADD COLUMN tool_ms      bigint NOT NULL DEFAULT 0,
    ADD COLUMN busy_ms      bigint NOT NULL DEFAULT 0,        -- in working states, up to `state_since`
    ADD COLUMN state_since  timestamptz NOT NULL DEFAULT now();
CREATE INDEX sessions_children ON sessions (parent_id) WHERE parent_id IS NOT NULL;
CREATE INDEX sessions_ended ON sessions (updated_at) WHERE state IN ('cancelled', 'completed');

INSERT INTO session_transitions (from_state, to_state) VALUES ('failed', 'paused');

CREATE OR REPLACE FUNCTION guard_session_state() RETURNS trigger LANGUAGE plpgsql AS $$
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
    IF NEW.state <> OLD.state THEN
        IF OLD.state IN ('provisioning', 'thinking', 'tool_running') THEN
            NEW.busy_ms := OLD.busy_ms
                + greatest(0, extract(epoch FROM clock_timestamp() - OLD.state_since) * 1000)::bigint;
        END IF;
        NEW.state_since := clock_timestamp();
    END IF;
    RETURN NEW;
END $$;

-- The transcript is a tree: a rewind goes on from an earlier step. `live` marks the branch that the session is on.
ALTER TABLE steps
    ADD COLUMN live boolean NOT NULL DEFAULT true,
    DROP CONSTRAINT steps_kind_check,
    ADD CONSTRAINT steps_kind_check CHECK (kind IN ('input', 'think', 'tool', 'decision', 'compaction')),
    DROP CONSTRAINT steps_check;                              -- a fork's input steps name no message of their own
CREATE INDEX steps_of_the_branch ON steps (session_id, step_no) WHERE live AND state = 'completed';

ALTER TABLE attempts
    DROP CONSTRAINT attempts_outcome_check,
    ADD CONSTRAINT attempts_outcome_check
        CHECK (outcome IN ('running', 'completed', 'failed', 'lost', 'cancelled', 'waiting', 'paused'));

ALTER TABLE tool_calls ADD COLUMN started_at timestamptz;    -- of its first run in its present sandbox

-- What was asked of a session beside messages. Accepted when its row commits; applied by the workflow, in order.
CREATE TABLE commands (
    command_id  text PRIMARY KEY,
    tenant_id   text NOT NULL REFERENCES tenants,
    session_id  text NOT NULL REFERENCES sessions,
    seq         bigint GENERATED ALWAYS AS IDENTITY,
    verb        text NOT NULL CHECK (verb IN ('pause', 'resume', 'retry', 'rewind', 'interrupt', 'answer')),
    argument    jsonb NOT NULL DEFAULT '{}',
    state       text NOT NULL DEFAULT 'accepted' CHECK (state IN ('accepted', 'done', 'refused')),
    error       text,
    created_at  timestamptz NOT NULL DEFAULT now(),
    done_at     timestamptz
);
CREATE INDEX commands_waiting ON commands (session_id, seq) WHERE state = 'accepted';

-- What a session waits for: a person's word, or the caller's result of a tool that runs at the caller.
CREATE TABLE questions (
    question_id text PRIMARY KEY,
    tenant_id   text NOT NULL REFERENCES tenants,
    session_id  text NOT NULL REFERENCES sessions,
    step_no     int NOT NULL,
    call_no     int NOT NULL DEFAULT -1,
    kind        text NOT NULL CHECK (kind IN ('approval', 'outcome', 'client_tool', 'budget')),
    about       jsonb NOT NULL,
    state       text NOT NULL DEFAULT 'open' CHECK (state IN ('open', 'answered', 'expired', 'void')),
    answer      jsonb,
    expires_at  timestamptz,
    created_at  timestamptz NOT NULL DEFAULT now(),
    answered_at timestamptz
);
CREATE UNIQUE INDEX one_open_question ON questions (session_id, step_no, call_no, kind) WHERE state <> 'void';
CREATE INDEX questions_open ON questions (tenant_id, created_at) WHERE state = 'open';
CREATE INDEX questions_of_session ON questions (session_id, step_no);
