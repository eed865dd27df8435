// Package rule has the rules of admission, the defaults for keys without a rule (defaults.go), and the
// mapping of keys to partitions (partition.go). It is pure. Read admission/table next, which keeps the
// buckets.
package rule
