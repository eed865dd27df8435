package main

import (
	"io/fs"
	"math"

	"github.com/srtm-io/srtm/internal/connlimit"
)

// perConnection is what memory a connection is reckoned to take, in bytes: a plain
// one that is idle takes less, one with TLS and compression more.
const perConnection = 16 << 10

// fit sets the numbers of connections that are not given to what the process may
// have of descriptors and of memory, in bytes; math.MaxInt64: it is not limited. A broker that
// forwards has a quarter of its connections to other brokers. Half
// of the descriptors that are spare is for HTTP, a quarter for files of messages that stay
// open, the rest for those in use, timers of contracts, and what else is open.
func (o *options) fit(descriptors, memory int64) {
	spare, given := connlimit.Spare(descriptors), o.conn.MaxConnections > 0
	if o.conn.MaxConnections == 0 {
		o.conn.MaxConnections = int(max(1, min(descriptors-spare, memory/perConnection, math.MaxInt32)))
	}
	if o.maxForwards = max(1, o.conn.MaxConnections/4); o.forwards() && !given {
		o.conn.MaxConnections = max(1, o.conn.MaxConnections-o.maxForwards)
	}
	if o.maxHTTPConnections == 0 {
		o.maxHTTPConnections = int(max(1, spare/2))
	}
	o.storage.MaxOpenFiles = int(max(1, spare/4))
}

// softLimit is the limit of memory to set, in bytes, of --memory-limit or by default;
// 0: none, since it is set already or it is unknown how much memory there is.
func softLimit(flag int64, env string, root fs.FS) int64 {
	switch {
	case env != "": // the runtime has read it
		return 0
	case flag > 0:
		return flag
	}
	return defaultLimit(root)
}
