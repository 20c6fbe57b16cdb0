-- What OpenAI's clients ask for: conversations, and responses, each a turn of a session.
CREATE TABLE conversations (
    conversation_id text PRIMARY KEY,
    tenant_id text NOT NULL REFERENCES tenants,
    metadata jsonb NOT NULL DEFAULT '{}',
    created_at timestamptz NOT NULL DEFAULT now()
);
CREATE INDEX conversations_of_tenants ON conversations (tenant_id, created_at);

CREATE TABLE conversation_items (
    conversation_id text NOT NULL REFERENCES conversations ON DELETE CASCADE,
    seq bigint GENERATED ALWAYS AS IDENTITY,
    item_id text NOT NULL,
    tenant_id text NOT NULL REFERENCES tenants,
    item jsonb NOT NULL,
    response_id text,  -- that it came from; null: it was given
    PRIMARY KEY (conversation_id, seq),
    UNIQUE (conversation_id, item_id)
);

CREATE TABLE responses (
    response_id text PRIMARY KEY,
    tenant_id text NOT NULL REFERENCES tenants,
    session_id text NOT NULL REFERENCES sessions ON DELETE CASCADE,
    parent_id text,  -- the response that it goes on from
    conversation_id text REFERENCES conversations ON DELETE SET NULL,
    message_id text,  -- null: it goes on with the results of calls
    from_pos bigint NOT NULL,  -- of the session's events: what comes after is its own
    end_pos bigint,
    end_step int,
    base jsonb NOT NULL,  -- as it was accepted
    root jsonb NOT NULL,  -- model, instructions and tools
    input jsonb NOT NULL,  -- items that were given, after those of its parent
    kept jsonb,  -- items that were made
    response jsonb,  -- null: it goes on
    digest text,  -- of the whole conversation up to its end
    stored boolean NOT NULL,
    request_hash text,  -- of who asked and what: clients that try again say nothing else
    claims int[] NOT NULL DEFAULT '{}',  -- numbers of the tries that were given this response
    created_at timestamptz NOT NULL DEFAULT now(),
    expires_at timestamptz NOT NULL
);
CREATE INDEX responses_by_digest ON responses (tenant_id, digest) WHERE digest IS NOT NULL;
CREATE INDEX responses_by_request ON responses (tenant_id, request_hash, created_at) WHERE request_hash IS NOT NULL;
CREATE INDEX responses_of_sessions ON responses (session_id, created_at);
CREATE INDEX responses_that_go_on ON responses (created_at) WHERE response IS NULL;
