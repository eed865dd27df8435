package main

import (
	"io/fs"
	"math"

	"github.com/srtm-io/srtm/internal/bounded"
)

// perConnection is the estimated memory of a connection, in bytes. A plain idle connection takes less;
// a connection with TLS and compression takes more.
const perConnection = 16 << 10

// fit sets the limits on connections that no flag sets. descriptors is the process's limit of file
// descriptors. memory is the limit of memory in bytes; math.MaxInt64: none. If the broker forwards, a
// quarter of its connections is for other brokers. Half of the spare descriptors are for HTTP, a
// quarter for message files that stay open. The rest is for message files in use, timers of contracts,
// and other files.
func (o *options) fit(descriptors, memory int64) {
	spare, fixed := bounded.Spare(descriptors), o.conn.MaxConnections > 0
	if o.conn.MaxConnections == 0 {
		o.conn.MaxConnections = int(max(1, min(descriptors-spare, memory/perConnection, math.MaxInt32)))
	}
	if o.maxForwards = max(1, o.conn.MaxConnections/4); o.forwards() && !fixed {
		o.conn.MaxConnections = max(1, o.conn.MaxConnections-o.maxForwards)
	}
	if o.addresses.maxHTTP == 0 {
		o.addresses.maxHTTP = int(max(1, spare/2))
	}
	o.storage.MaxOpenFiles = int(max(1, spare/4))
}

// softLimit returns the memory limit to set, in bytes: --memory-limit or the default. 0: none, as
// GOMEMLIMIT is set or the size of the memory is unknown.
func softLimit(flag int64, env string, root fs.FS) int64 {
	switch {
	case env != "": // the runtime has applied GOMEMLIMIT
		return 0
	case flag > 0:
		return flag
	}
	return defaultLimit(root)
}
