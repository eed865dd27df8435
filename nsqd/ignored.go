package main

import (
	"flag"
	"fmt"
	"hash/fnv"
	"strconv"
	"time"

	"github.com/srtm-io/srtm/internal/daemon"
	"github.com/srtm-io/srtm/internal/faults"
)

// ignored has the flags of NSQ's nsqd that have no effect in this nsqd. nsqd checks their values as NSQ
// does.
type ignored struct {
	syncEvery   int64
	syncTimeout time.Duration
	nodeID      int
}

// noEffect begins the help of an NSQ flag that has no effect in this nsqd.
const noEffect = "accepted for compatibility; ignored"

// Flags defines the flags.
func (i *ignored) Flags(fs *flag.FlagSet) {
	fs.Int64Var(&i.syncEvery, "sync-every", 2500, "`messages`; "+noEffect+": --durability says when they are on stable storage")
	fs.DurationVar(&i.syncTimeout, "sync-timeout", 2*time.Second, noEffect+", as --sync-every")
	fs.IntVar(&i.nodeID, "node-id", nodeID(hostname()), "`number` in [0, 1024) for NSQ's message ids (default a hash of the hostname); "+noEffect)
	daemon.Alias(fs, "node-id", "id", daemon.NSQName)
	fs.String("log-prefix", "[nsqd] ", noEffect+": log lines are structured and have no prefix")
	fs.Int("queue-scan-selection-count", 20, noEffect+": timeouts need no scans")
	fs.Int("queue-scan-worker-pool-max", 4, noEffect+": timeouts need no scans")
	fs.Bool("verbose", false, noEffect+", as by NSQ: use --log-level")
	fs.BoolFunc("worker-id", noEffect+": NSQ calls it --node-id now", number)
}

// CheckFlags returns all problems of the flags' values.
func (i *ignored) CheckFlags() error {
	var errs faults.List
	errs.If(i.syncEvery < 1, "--sync-every %d is less than 1", i.syncEvery)
	errs.Add(faults.Within("node-id", i.nodeID, 0, nodeIDs-1))
	errs.If(i.syncTimeout <= 0, "--sync-timeout %v is not positive", i.syncTimeout)
	return errs.Err()
}

// nodeIDs is the number of NSQ node ids.
const nodeIDs = 1024

// nodeID returns the default node id of a host.
func nodeID(host string) int {
	h := fnv.New32a()
	h.Write([]byte(host))
	return int(h.Sum32() % nodeIDs)
}

// number accepts the values that versions of NSQ have accepted for --worker-id: a number or a boolean.
func number(s string) error {
	_, notBool := strconv.ParseBool(s)
	_, notInt := strconv.ParseInt(s, 10, 64)
	if notBool != nil && notInt != nil {
		return fmt.Errorf("%q is no number", s)
	}
	return nil
}
