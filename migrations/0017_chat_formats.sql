-- How nodes write and count the tokens of their model: the API has no model file of its own. Named by content; what no
-- node names any longer goes when another one comes.
CREATE TABLE chat_formats (
    digest     text PRIMARY KEY,
    data       bytea NOT NULL,
    created_at timestamptz NOT NULL DEFAULT now()
);
ALTER TABLE chat_formats ALTER COLUMN data SET STORAGE EXTERNAL;  -- it is compressed
ALTER TABLE nodes ADD COLUMN chat text;                           -- null: a node of an earlier release
