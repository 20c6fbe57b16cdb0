-- Sandboxes that a node keeps ready for whoever comes: nobody's yet, and nobody's if that life of the node is over.

CREATE TABLE sandbox_spares (
    sandbox_id text PRIMARY KEY,
    node_id    text NOT NULL,
    boot       text NOT NULL,
    created_at timestamptz NOT NULL DEFAULT now()
);

-- The workspace as it was when a sandbox was given up, where something had changed it after the last step: what comes
-- after that step goes on from there.
ALTER TABLE sandboxes ADD COLUMN base_root text;              -- the workspace of that step
ALTER TABLE sandboxes ADD COLUMN left_root text;

-- Which sandboxes of a node nobody has used for a while.
CREATE INDEX sandboxes_of_node ON sandboxes (node_id) WHERE state = 'live';
