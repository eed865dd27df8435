// Package compress compresses and decompresses the two directions of a client's
// stream, in the formats that NSQ's IDENTIFY negotiates: Snappy's framing
// format and raw DEFLATE. Each direction is one compressed stream that lasts as
// long as the connection, flushed wherever the peer must be able to read on.
//
// It must not know frames, sockets or deadlines. nsqd/conn puts it around a
// connection. Formats: the "framing_format.txt" of google/snappy, RFC 1951.
//
// What a connection costs matters more here than a few per cent of ratio:
// packing Snappy takes no memory between two calls, and packing DEFLATE takes
// the megabyte of its state only for who receives messages, see Deflate.
package compress
