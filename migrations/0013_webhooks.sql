-- Webhooks, and the outbox of what is to be sent to them: a row comes with the very event that it tells of, in whichever
-- transaction that is written, and is sent by a workflow that a node starts from it.

CREATE TABLE webhooks (
    webhook_id   text PRIMARY KEY,
    tenant_id    text NOT NULL REFERENCES tenants,
    url          text NOT NULL,
    types        text[] NOT NULL,         -- of events: exact ones, and those that end in .* by their beginning
    description  text NOT NULL,
    secret       text NOT NULL,           -- sealed
    old_secret   text,                    -- sealed; signs too, until then
    old_until    timestamptz,
    rotated_by   text,                    -- the request that made the present secret
    disabled_at  timestamptz,
    disabled_why text,
    created_at   timestamptz NOT NULL DEFAULT now(),
    updated_at   timestamptz NOT NULL DEFAULT now()
);
CREATE INDEX webhooks_of_tenant ON webhooks (tenant_id, webhook_id);

CREATE TABLE webhook_deliveries (
    delivery_id  text PRIMARY KEY,        -- the webhook-id of every try
    tenant_id    text NOT NULL REFERENCES tenants,
    webhook_id   text NOT NULL REFERENCES webhooks ON DELETE CASCADE,
    session_id   text,
    pos          bigint,                  -- of the event
    type         text NOT NULL,
    body         text NOT NULL,           -- the bytes that are signed and sent, the same at every try
    state        text NOT NULL DEFAULT 'pending' CHECK (state IN ('pending', 'delivered', 'failed', 'cancelled')),
    round        int NOT NULL DEFAULT 1,  -- how often it was asked for, replays counted
    attempts     int NOT NULL DEFAULT 0,  -- of this round
    last_status  int,
    last_error   text,
    replayed_by  text,                    -- the request that asked for this round
    handed_at    timestamptz,             -- to Temporal; null: still to be
    next_at      timestamptz NOT NULL DEFAULT now(),
    created_at   timestamptz NOT NULL DEFAULT clock_timestamp(),
    ended_at     timestamptz
);
CREATE INDEX webhook_outbox ON webhook_deliveries (next_at) WHERE state = 'pending';
CREATE INDEX webhook_deliveries_of ON webhook_deliveries (webhook_id, created_at DESC, delivery_id DESC);

-- Once for each statement that writes events; it finds nothing in an index where the tenant has no webhook. What is said
-- of an event is where it stands, not what is in it.
CREATE FUNCTION queue_webhooks() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO webhook_deliveries (delivery_id, tenant_id, webhook_id, session_id, pos, type, body)
    SELECT 'whd_' || encode(substr(sha256(convert_to(w.webhook_id || '/' || e.session_id || '/' || e.pos, 'UTF8')), 1, 12), 'hex'),
        e.tenant_id, w.webhook_id, e.session_id, e.pos, e.type,
        json_build_object('type', e.type, 'timestamp', to_json(e.created_at AT TIME ZONE 'UTC') #>> '{}' || 'Z',
            'data', json_build_object('session_id', e.session_id, 'event', e.pos, 'step', e.step_no, 'state', s.state))::text
    FROM written e
    JOIN webhooks w ON w.tenant_id = e.tenant_id AND w.disabled_at IS NULL
    JOIN sessions s ON s.session_id = e.session_id
    WHERE e.type = ANY (w.types)
        OR EXISTS (SELECT FROM unnest(w.types) AS t WHERE t LIKE '%.*' AND starts_with(e.type, left(t, -1)))
    ON CONFLICT DO NOTHING;
    RETURN NULL;
END $$;
CREATE TRIGGER events_queue_webhooks AFTER INSERT ON events
    REFERENCING NEW TABLE AS written FOR EACH STATEMENT EXECUTE FUNCTION queue_webhooks();
