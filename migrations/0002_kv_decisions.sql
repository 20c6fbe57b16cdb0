-- The decision log of the KV tiers: what was predicted of every pin, move, restore and recompute, and what it took.
-- An engine tells of a decision again when it is settled, so rows are replaced by (engine_boot, seq).

CREATE TABLE kv_decisions (
    engine_boot text NOT NULL,
    seq         bigint NOT NULL,
    tenant_id   text NOT NULL REFERENCES tenants,
    session_id  text NOT NULL REFERENCES sessions,
    step_no     int NOT NULL,             -- 0: not asked for by a step of this session
    decided_at  timestamptz NOT NULL,
    reason      text NOT NULL,
    action      text NOT NULL,
    place       text NOT NULL,
    tokens      bigint NOT NULL,
    bytes       bigint NOT NULL,
    predicted_s double precision,
    realised_s  double precision,
    instead_s   double precision,         -- what computing the same tokens would take
    status      text NOT NULL,
    detail      text NOT NULL,
    PRIMARY KEY (engine_boot, seq)
);
CREATE INDEX kv_decisions_of_session ON kv_decisions (session_id, decided_at, seq);

ALTER TABLE kv_residency DROP CONSTRAINT kv_residency_tier_check;
ALTER TABLE kv_residency ADD CONSTRAINT kv_residency_tier_check
    CHECK (tier IN ('none', 'device', 'host', 'nvme', 'shared'));
