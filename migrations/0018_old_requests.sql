-- Requests that are old enough to be forgotten are found without looking at all of them.
CREATE INDEX idempotency_by_age ON idempotency (created_at);
