// Package metadata keeps on disk which topics and channels a node has, what of
// them is paused, and under which contract a topic is: everything of a node but
// its messages. It must not know what a topic does.
//
// The file is JSON, for people to look at, with a checksum over what counts: it
// is replaced as a whole, and one that was damaged or edited is an error, never
// half a list. Read state.go next.
package metadata
