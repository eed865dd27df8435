// Package store keeps admission's rules, the credits of keys, and the owners of partitions in SQLite or
// PostgreSQL, with the same SQL. rules.go and credits.go have the methods for servers, schema.go the
// tables.
//
// Rules and credits are in separate tables, so that a check-point never undoes an edit nor an edit a
// check-point. Each edit of a rule takes the next number of a counter in its own transaction, and locks
// the counter until the end. So edits become visible in the order of their numbers, and a server that
// asks for all edits above the last number misses none.
package store
