// Package rule has what admission decides by: rules, the defaults for keys that
// have none (defaults.go), and which server owns a key (partition.go). It is pure.
// Read admission/table next for how a key's bucket is kept.
package rule
