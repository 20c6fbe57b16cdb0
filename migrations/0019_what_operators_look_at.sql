-- Lists of everybody's sessions in order, those that failed, and how long the newest steps took: found by an index,
-- however many there are.
CREATE INDEX sessions_in_order ON sessions (created_at DESC, session_id DESC);
CREATE INDEX sessions_failed ON sessions (updated_at DESC) WHERE state = 'failed';
CREATE INDEX steps_by_end ON steps (ended_at DESC) WHERE ended_at IS NOT NULL;
CREATE INDEX kv_residency_by_tier ON kv_residency (tier, session_id);
CREATE INDEX events_of_denials ON events (created_at DESC) WHERE type = 'sandbox.egress_denied';

-- A node that drains, or is drained, and is to take sessions again: it begins a new life, whose registration clears this.
ALTER TABLE nodes ADD COLUMN wanted_back boolean NOT NULL DEFAULT false;
