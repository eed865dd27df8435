// Package compress compresses and decompresses the two directions of a client's stream, in the
// formats that NSQ's IDENTIFY negotiates: Snappy's framing format and raw DEFLATE. Each direction
// is one compressed stream for the life of the connection, flushed wherever the peer must be able
// to continue reading.
//
// The package must not know frames, sockets or deadlines; nsqd/conn applies it to a connection.
// Formats: the "framing_format.txt" of google/snappy, RFC 1951.
//
// The memory of a connection matters more here than a few per cent of ratio. Packing Snappy holds
// no memory between two calls. Packing DEFLATE holds its megabyte only for clients that receive
// messages, see Deflate.
package compress
