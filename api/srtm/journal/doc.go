// Package journal is generated from journal.proto: the records of the control plane's
// journal. loaddistributor/store reads and writes them.
package journal
