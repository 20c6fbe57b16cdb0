-- What applying a command led to, and which activity applied it: one whose answer was lost is asked again, and answers
-- the same.

ALTER TABLE commands
    ADD COLUMN led_to     text CHECK (led_to IN ('moved', 'interrupt')),
    ADD COLUMN applied_by text;                               -- the activity's run and id, without its attempt
CREATE INDEX commands_applied ON commands (applied_by) WHERE applied_by IS NOT NULL;
