// Package diskqueue keeps ordered queues of records on disk: what a topic or a
// channel cannot hold in memory, or must not lose. A record is a string of
// bytes; the package knows nothing of messages, topics or NSQ, and no other
// package writes message files.
//
// A Dir is a folder that this process owns; a Queue in it is a folder of
// segment files, appended to at one end and deleted at the other, and of a
// cursor file that says up to where records are done with. format.go draws the
// files byte by byte.
//
// # What is promised
//
//   - Append is all or nothing. When it fails, because the disk is full for
//     instance, nothing was appended, and the next one may work.
//   - When SyncTo or Sync returns nil, the records it covers survive the loss of
//     power; callers at the same time share one fsync. Records that were appended
//     and not synced survive the end of the process, but not that of the machine.
//   - Records are read in the order they were appended in, each once, until Rewind
//     or Open start again at what was released, or checkpointed, last. So each is
//     delivered at least once.
//   - A record that is returned is one that was appended, byte for byte. What
//     cannot be read is skipped, counted and logged, its file is kept under another
//     name, and everything else in the queue is still read.
//   - Nothing intact is destroyed by recovery: a file is cut only after its last
//     intact record.
//
// # What is verified when
//
// Open verifies the header and the footer of each segment, which tell how many
// records it has, without reading those. A segment that has no footer, since the
// process ended before the segment was full, is read to its end; that is at most
// one of SegmentBytes unless footers could not be written. The checksum of a
// record is verified each time it is read, and by nothing else: a record that
// rots on the disk is found when its turn comes.
//
// Read queue.go next, then recover.go.
package diskqueue
