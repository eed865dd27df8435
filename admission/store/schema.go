// Package store keeps admission's rules, the credits of keys, and the owners of partitions in SQLite or
// PostgreSQL, with the same SQL. rules.go and credits.go have the methods for servers, schema.go the
// tables.
//
// Rules and credits are in separate tables, so that a check-point never undoes an edit nor an edit a
// check-point. Each edit of a rule takes the next number of a counter in its own transaction, and locks
// the counter until the end. So edits become visible in the order of their numbers, and a server that
// reads all edits above the last number misses none.
package store

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"net/url"
	"os"
	"strings"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/stdlib"
	_ "modernc.org/sqlite" // the driver "sqlite"

	"github.com/srtm-io/srtm/admission/rule"
)

// version is the version of the tables. A store with another version is refused.
const version = 5

var schema = []string{
	`CREATE TABLE IF NOT EXISTS admission (version BIGINT NOT NULL, change BIGINT NOT NULL,
		owners BIGINT NOT NULL, at_ms BIGINT NOT NULL)`,
	`CREATE TABLE IF NOT EXISTS rules (
		key TEXT PRIMARY KEY, rate_milli BIGINT NOT NULL, period_s BIGINT NOT NULL, capacity BIGINT NOT NULL,
		strict BOOLEAN NOT NULL, shadow BOOLEAN NOT NULL, fail_open BOOLEAN NOT NULL,
		change BIGINT NOT NULL, deleted_ms BIGINT)`,
	`CREATE INDEX IF NOT EXISTS rules_by_change ON rules (change)`,
	`CREATE TABLE IF NOT EXISTS credits (
		key TEXT PRIMARY KEY, credit_milli BIGINT NOT NULL, at_ms BIGINT NOT NULL)`,
	`CREATE TABLE IF NOT EXISTS servers (
		address TEXT PRIMARY KEY, instance BIGINT NOT NULL, heartbeat BIGINT NOT NULL, at_ms BIGINT NOT NULL,
		replicate TEXT NOT NULL, follower BIGINT NOT NULL)`,
	`CREATE TABLE IF NOT EXISTS partitions (
		p INTEGER PRIMARY KEY, server TEXT NOT NULL, epoch BIGINT NOT NULL, lost_ms BIGINT NOT NULL, target TEXT NOT NULL)`,
}

const (
	maxConnections = 16               // to PostgreSQL; further requests wait
	maxReaders     = 2                // of SQLite; further reads wait
	patience       = 10 * time.Second // wait for an answer of the database; callers may wait less
)

var errSilent = fmt.Errorf("the database has not answered within %v", patience)

// Store is safe for concurrent use.
type Store struct {
	db       *sql.DB
	reads    *sql.DB // for reads outside of transactions; db itself with PostgreSQL
	postgres bool
	editing  chan struct{} // capacity 1: serializes edits of rules, so that waiting edits hold no connections
}

// Open opens the store and creates its tables if needed. database is the URL of a PostgreSQL database
// (postgres://...) or the path of a SQLite file.
func Open(ctx context.Context, database string) (*Store, error) {
	s := &Store{editing: make(chan struct{}, 1), postgres: strings.HasPrefix(database, "postgres://") || strings.HasPrefix(database, "postgresql://")}
	var err error
	if s.postgres {
		var cfg *pgx.ConnConfig
		if cfg, err = pgx.ParseConfig(database); err == nil {
			// A pooler such as PgBouncer may give each transaction another connection. So a connection
			// keeps no state: no prepared statements, and settings only within a transaction.
			cfg.DefaultQueryExecMode = pgx.QueryExecModeExec
			s.db = stdlib.OpenDB(*cfg)
			s.db.SetMaxOpenConns(maxConnections)
			s.reads = s.db
		}
	} else {
		f, err := os.OpenFile(database, os.O_RDWR|os.O_CREATE, 0o600) // SQLite would make the file readable for all users
		if err != nil {
			return nil, fmt.Errorf("open the admission store: %w", err)
		}
		f.Close()
		// SQLite has one writer, so writes have one connection. Reads have their own, since a write may wait for a
		// slow disk, and the look-up of a key must not wait with it.
		name := "file:" + (&url.URL{Path: database}).EscapedPath() + "?_pragma=busy_timeout(5000)"
		if s.db, err = sql.Open("sqlite", name+"&_pragma=journal_mode(WAL)&_pragma=synchronous(FULL)&_txlock=immediate"); err == nil {
			s.db.SetMaxOpenConns(1)
			s.reads, err = sql.Open("sqlite", name+"&_pragma=query_only(1)")
		}
		if err == nil {
			s.reads.SetMaxOpenConns(maxReaders)
		}
	}
	if err == nil {
		err = s.prepare(ctx)
	}
	if err != nil {
		s.Close()
		if full := (interface{ Code() int })(nil); errors.As(err, &full) && full.Code() == sqliteFull {
			err = fmt.Errorf("%w: %w", err, syscall.ENOSPC)
		}
		return nil, fmt.Errorf("open the admission store: %w", err)
	}
	return s, nil
}

// sqliteFull is SQLite's code for a full disk.
const sqliteFull = 13

// Close closes the store. After a failure of Open, Close closes the pools that Open has opened.
func (s *Store) Close() (err error) {
	if s.reads != nil && s.reads != s.db {
		err = s.reads.Close()
	}
	if s.db != nil {
		err = errors.Join(err, s.db.Close())
	}
	return err
}

func (s *Store) prepare(ctx context.Context) error {
	return s.transact(ctx, func(t *tx) {
		if s.postgres { // two servers may start at once
			t.do(`SELECT pg_advisory_xact_lock(4193)`)
		}
		for _, statement := range schema {
			t.do(statement)
		}
		if t.do(`INSERT INTO admission (version, change, owners, at_ms) SELECT CAST($1 AS BIGINT), 0, 0, 0 WHERE NOT EXISTS (SELECT 1 FROM admission)`, version) > 0 {
			t.do(fmt.Sprintf(`WITH RECURSIVE n (p) AS (SELECT 0 UNION ALL SELECT p + 1 FROM n WHERE p < %d)
				INSERT INTO partitions (p, server, epoch, lost_ms, target) SELECT p, '', 0, 0, '' FROM n`, rule.Partitions-1))
		}
		if is := t.get(`SELECT version FROM admission`); is != version {
			t.fail(fmt.Errorf("its tables have version %d, this program knows %d", is, version))
		}
	})
}

// tx is a transaction. After the first error its methods do nothing.
type tx struct {
	*sql.Tx
	ctx context.Context
	err error
}

func (t *tx) fail(err error) {
	if t.err == nil {
		t.err = err
	}
}

// do runs a statement and returns the number of changed rows.
func (t *tx) do(query string, args ...any) (rows int64) {
	if t.err != nil {
		return 0
	}
	result, err := t.ExecContext(t.ctx, query, args...)
	if err == nil {
		rows, err = result.RowsAffected()
	}
	t.err = err
	return rows
}

// expectRow runs a statement, and fails with or if no row changed.
func (t *tx) expectRow(failure error, query string, args ...any) {
	if t.do(query, args...) == 0 {
		t.fail(failure)
	}
}

// get returns the number that a query selects.
func (t *tx) get(query string, args ...any) (n int64) {
	if t.err == nil {
		t.err = t.QueryRowContext(t.ctx, query, args...).Scan(&n)
	}
	return n
}

// patient limits the time of a database request. done replaces a timeout error by errSilent.
func patient(ctx context.Context) (limited context.Context, done func(*error)) {
	limited, cancel := context.WithTimeoutCause(ctx, patience, errSilent)
	return limited, func(err *error) {
		if limited.Err() != nil && (errors.Is(*err, sql.ErrTxDone) || errors.Is(*err, limited.Err())) {
			*err = context.Cause(limited)
		}
		cancel()
	}
}

func (s *Store) transact(ctx context.Context, f func(t *tx)) (err error) {
	ctx, done := patient(ctx)
	defer done(&err)
	sqlTx, err := s.db.BeginTx(ctx, nil)
	if err != nil {
		return err
	}
	t := &tx{Tx: sqlTx, ctx: ctx}
	if s.postgres { // frees the locks of a disconnected server before its lease is over
		t.do(`SET LOCAL idle_in_transaction_session_timeout = '2s'`)
	}
	if f(t); t.err == nil {
		t.err = t.Commit()
	} else {
		t.Rollback()
	}
	return t.err
}
