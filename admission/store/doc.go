// Package store keeps admission's rules, the credits of keys, and who owns which
// partition, in SQLite or PostgreSQL, by the same SQL.
//
// rules.go and credits.go are what a server needs of it, schema.go the tables.
// Rules and credits stand apart, so that a check-point never undoes an edit nor an
// edit a check-point. Each edit of a rule takes the next number of one counter in its
// own transaction, whose lock on the counter is held to the end: so changes become
// visible in the order of their numbers, and "all above the last one I saw" misses none.
package store
