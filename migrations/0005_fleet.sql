-- Several nodes: where the engine of each answers and when it did last, and who is to take no more sessions.

ALTER TABLE nodes ADD COLUMN engine text;           -- its address, as the node knows it
ALTER TABLE nodes ADD COLUMN engine_at timestamptz NOT NULL DEFAULT now();
ALTER TABLE nodes ADD COLUMN draining boolean NOT NULL DEFAULT false;
ALTER TABLE nodes ADD COLUMN drained_at timestamptz;

CREATE INDEX sessions_of_node ON sessions (node_id, state) WHERE state NOT IN ('cancelled', 'completed');
CREATE INDEX attempts_of_node ON attempts (node_id, session_id);
