-- The tables of hive.db. STRICT: a value of another type is refused when it is written (sqlite.org/stricttables.html).
-- Paths below the home are relative to it (base/disk.py), so that a home can be moved and copied.

CREATE TABLE interactions (
  id TEXT PRIMARY KEY,             -- content_id, or the id that the gateway or another store gave
  content_id TEXT NOT NULL,        -- hash of the content alone: equal for exact duplicates
  source TEXT NOT NULL,            -- file:line, table:rowid or stream:id
  session TEXT, user TEXT, agent TEXT, category TEXT,
  time REAL, success INTEGER, feedback REAL,
  row TEXT NOT NULL                -- the row as it came, JSON
) STRICT;
CREATE INDEX interactions_content ON interactions(content_id);
CREATE TABLE cursors (source TEXT PRIMARY KEY, position TEXT NOT NULL) STRICT;
CREATE TABLE runs (path TEXT PRIMARY KEY, name TEXT NOT NULL, created REAL NOT NULL, snapshot TEXT NOT NULL) STRICT;
CREATE TABLE snapshots (hash TEXT PRIMARY KEY, path TEXT NOT NULL, created REAL NOT NULL) STRICT;
CREATE TABLE forgotten (kind TEXT NOT NULL, value TEXT NOT NULL, time REAL NOT NULL, PRIMARY KEY (kind, value)) STRICT;

CREATE TABLE refused (             -- what came in and is no row: kept aside, never lost in silence
  id TEXT PRIMARY KEY,
  source TEXT NOT NULL,            -- as in interactions
  reason TEXT NOT NULL, hint TEXT NOT NULL,
  raw BLOB NOT NULL,               -- its first bytes
  time REAL NOT NULL
) STRICT;
CREATE TABLE intake (              -- per source, since the beginning; committed with the rows themselves
  source TEXT PRIMARY KEY,
  stored INTEGER NOT NULL, duplicates INTEGER NOT NULL, refused INTEGER NOT NULL, forgotten INTEGER NOT NULL
) STRICT;
CREATE TABLE tainted (             -- snapshots that hold rows which were forgotten later
  snapshot TEXT NOT NULL, kind TEXT NOT NULL, value TEXT NOT NULL, rows INTEGER NOT NULL, time REAL NOT NULL,
  PRIMARY KEY (snapshot, kind, value)
) STRICT;
CREATE INDEX interactions_source ON interactions(source);
CREATE INDEX interactions_session ON interactions(session);
CREATE INDEX interactions_user ON interactions(user);
CREATE INDEX interactions_review ON interactions(
  coalesce(feedback, 0), coalesce(CAST(row ->> 'logprob' AS REAL), 1.0), -coalesce(time, 0), id
);
CREATE INDEX interactions_corrected ON interactions(id) WHERE row ->> 'rejected_answer' NOT NULL;
CREATE INDEX interactions_unapproved ON interactions(id) WHERE row ->> 'answered_by' NOT NULL AND feedback IS NULL;
CREATE TABLE set_aside (           -- rows that a person keeps out of training, by their content
  content_id TEXT PRIMARY KEY, by TEXT NOT NULL, time REAL NOT NULL
);
CREATE TABLE acts (                -- of people on rows, with what was before each; forgotten with their rows
  number INTEGER PRIMARY KEY, interaction TEXT NOT NULL, act TEXT NOT NULL, by TEXT NOT NULL, time REAL NOT NULL,
  before TEXT NOT NULL, undone REAL
);
CREATE INDEX acts_interaction ON acts(interaction);

CREATE TABLE releases (            -- artefacts in releases/NAME/VERSION; a row here makes a release
  name TEXT NOT NULL, version INTEGER NOT NULL,
  run TEXT NOT NULL,               -- the folder that it was copied from; may be gone
  model TEXT NOT NULL, model_sha256 TEXT NOT NULL, adapter_sha256 TEXT NOT NULL, snapshot TEXT NOT NULL,
  verdict TEXT,                    -- of the gate; NULL: never judged
  proof TEXT NOT NULL CHECK (json_valid(proof)),  -- what was proven of its exports
  created REAL NOT NULL,
  pruned INTEGER NOT NULL DEFAULT 0,   -- its artefacts were deleted on purpose
  PRIMARY KEY (name, version)
) STRICT;
CREATE INDEX releases_snapshot ON releases(snapshot);
CREATE TABLE moves (               -- the log of what became of each version; aliases follow from it (release/registry.py)
  number INTEGER PRIMARY KEY, name TEXT NOT NULL, version INTEGER NOT NULL,
  action TEXT NOT NULL CHECK (action IN ('registered', 'promoted', 'returned', 'withdrawn', 'retired')),
  time REAL NOT NULL, by TEXT NOT NULL, reason TEXT NOT NULL, forced INTEGER NOT NULL,
  FOREIGN KEY (name, version) REFERENCES releases(name, version)
) STRICT;
CREATE INDEX moves_name ON moves(name);

CREATE TABLE clients (             -- of the gateway
  name TEXT PRIMARY KEY, token_sha256 TEXT NOT NULL, created REAL NOT NULL, revoked REAL
) STRICT;
CREATE TABLE feedback (
  answer TEXT PRIMARY KEY,         -- id of the interaction that was captured
  release TEXT NOT NULL, rating TEXT, correction TEXT, reason TEXT, client TEXT NOT NULL, time REAL NOT NULL
) STRICT;
CREATE TABLE served (              -- answers of each release, and the watch on it (serve/watch.py)
  release TEXT PRIMARY KEY, counts TEXT NOT NULL CHECK (json_valid(counts))
) STRICT;

CREATE TABLE cycles (
  id TEXT PRIMARY KEY,             -- hash of rows, settings and champion
  name TEXT NOT NULL,              -- of the releases
  opened REAL NOT NULL, opened_for TEXT NOT NULL, config TEXT NOT NULL, champion TEXT,
  domain TEXT,                     -- of which name's rows and by which value, JSON; NULL for a name's own cycle
  station TEXT NOT NULL DEFAULT '',       -- the newest that failed
  failures INTEGER NOT NULL DEFAULT 0,    -- of it, in a row
  failed REAL, words TEXT NOT NULL DEFAULT '',  -- the newest failure
  closed REAL, ending TEXT, reason TEXT NOT NULL DEFAULT ''
) STRICT;
CREATE TABLE cycle_rows (          -- rows (hashes of their content) that a cycle has trained on or held out
  name TEXT NOT NULL, row TEXT NOT NULL, PRIMARY KEY (name, row)
) STRICT, WITHOUT ROWID;
