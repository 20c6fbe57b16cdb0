-- Workspaces that a change came across on its way and no checkpoint names: their blobs go with the session.
ALTER TABLE commands ADD COLUMN roots text[] NOT NULL DEFAULT '{}';
