-- What the MCP servers of a session said that they offer: asked once, so that every node renders the same transcript
-- and guides the model by the same schemas, whatever a server says later.

CREATE TABLE session_tools (
    session_id  text PRIMARY KEY REFERENCES sessions,
    tenant_id   text NOT NULL REFERENCES tenants,
    listings    jsonb NOT NULL,           -- server -> {handshake, tools: [{name, description, parameters}]}
    created_at  timestamptz NOT NULL DEFAULT now()
);
