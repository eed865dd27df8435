// Package metadata stores a node's topics and channels on disk, with their pauses and contracts:
// all state of a node except its messages. The package must not know what a topic does.
//
// The file is JSON, readable by people, with a checksum over the topics. A write replaces the
// whole file. A damaged or edited file is an error and never yields half a list. Read state.go
// next.
package metadata
