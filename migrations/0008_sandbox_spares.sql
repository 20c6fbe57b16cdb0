-- Sandboxes that a node keeps ready for whoever comes: nobody's yet, and nobody's if that life of the node is over.

CREATE TABLE sandbox_spares (
    sandbox_id text PRIMARY KEY,
    node_id    text NOT NULL,
    boot       text NOT NULL,
    created_at timestamptz NOT NULL DEFAULT now()
);

-- Which sandboxes of a node nobody has used for a while.
CREATE INDEX sandboxes_of_node ON sandboxes (node_id) WHERE state = 'live';
