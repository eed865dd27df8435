// Package store keeps the control plane's events durable and in order. One process at a
// time appends. Bolt is a file of one process. Etcd is shared by several processes, and
// one of them leads. Memory is for temporary clusters. One suite of tests runs over all
// three.
//
// The package encodes events (record.go) but does not interpret them.
// loaddistributor/catalog applies events, and loaddistributor/controller decides when to
// append. Read store.go next for the guarantees of a store.
package store

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/loaddistributor/catalog"
)

var (
	// ErrLost: the term is over; another process may lead.
	ErrLost = errors.New("the leadership is lost")
	// ErrFull: the store has no room. The store has kept none of the data and never will.
	// The term continues, and the caller may retry.
	ErrFull = errors.New("the store has no room")
	// ErrGap: the events do not continue the log. Another process has appended, or the
	// caller has lost count. In both cases the caller must load again.
	ErrGap = errors.New("the events do not continue the log")
)

// Store is a log of events with at most one leader.
type Store interface {
	// Lead waits until this process leads. It returns the term and the catalog of the log.
	// Leader returns advertise to other processes. The caller may call Lead again after
	// the term has ended.
	Lead(ctx context.Context, advertise string) (Term, *catalog.Catalog, error)
	// Follow passes the state of the log, and then every appended event in order, until
	// ctx ends (nil) or the log cannot be read. After a gap, by a compaction or an
	// unreadable log (Cut), Follow passes the state again.
	Follow(ctx context.Context, f Follower) error
	// Leader returns the advertised address of the present leader, or "".
	Leader(ctx context.Context) (string, error)
	// Close closes the store. Requires: terms and Follow calls have ended.
	Close() error
}

// Follower receives a log. Its calls do not overlap.
type Follower interface {
	Reset(*catalog.Catalog)
	Apply(catalog.Event) error
	Cut(error) // the log cannot be read until the next Reset
}

// Term is one process's time as leader. One goroutine calls its methods. Number, Until
// and Lost may be called at any time.
type Term interface {
	// Append makes events durable, in order. base is the catalog's version before the
	// first event. If Append returns nil, no crash and no other leader loses the events.
	// On ErrFull the store keeps none of the events, and the term continues. After any
	// other error some of the first events may be stored, and the term is unusable. The
	// error is ErrLost, ErrGap, or the medium's error.
	Append(ctx context.Context, base uint64, events []catalog.Event) error
	// Compact replaces all events up to the dump's version with the dump. After an error
	// the term continues and the events stay.
	Compact(ctx context.Context, dump catalog.Dump) error
	// Number returns a number greater than the number of any earlier term of this log. If
	// possible it counts milliseconds since 1970. So it also exceeds the numbers of a log
	// that this log was copied from or replaced. At any time.
	Number() uint64
	// Until returns the end of the term, by this process's clock, unless the store extends
	// the term in the meantime. No other term begins before. mono.Never means that no
	// other process can take over. At any time.
	Until() mono.Time
	// Lost returns a channel that is closed when the term ends without Resign.
	Lost() <-chan struct{}
	// Resign ends the term, so another term may begin at once.
	Resign(ctx context.Context) error
}

// alone implements the methods that a single-process store does not support.
type alone struct{}

// errAlone: only the leader can read a single-process store.
var errAlone = errors.New("the store is of one process: no other can follow it")

// Follow implements Store.
func (alone) Follow(context.Context, Follower) error { return errAlone }

// Leader implements Store.
func (alone) Leader(context.Context) (string, error) { return "", nil }

// Close implements Store.
func (alone) Close() error { return nil }

// term is the common part of the terms of all stores. A term never ends by itself here.
// Each store wraps term and stores the results of records and dump.
type term struct {
	number uint64
	head   uint64 // version of the last event
	ended  bool
	lost   chan struct{}
}

func newTerm(number uint64, cat *catalog.Catalog) term {
	return term{number: number, head: cat.Version(), lost: make(chan struct{})}
}

// Number implements Term.
func (t *term) Number() uint64 { return t.number }

// Until implements Term.
func (t *term) Until() mono.Time { return mono.Never }

// Lost implements Term.
func (t *term) Lost() <-chan struct{} { return t.lost }

// records encodes the events for an append, if the append is valid.
func (t *term) records(base uint64, events []catalog.Event) ([][]byte, error) {
	switch {
	case t.ended:
		return nil, ErrLost
	case base != t.head:
		return nil, fmt.Errorf("append after %d, the log ends at %d: %w", base, t.head, ErrGap)
	}
	return encodeEvents(events)
}

// dump encodes the catalog that replaces the events up to its version, if the dump is
// valid.
func (t *term) dump(d catalog.Dump) ([]byte, error) {
	switch {
	case t.ended:
		return nil, ErrLost
	case d.Version > t.head:
		return nil, fmt.Errorf("compact up to %d, the log ends at %d: %w", d.Version, t.head, ErrGap)
	}
	return encodeDump(d)
}

// numberAfter returns the number of the term after the term with number last.
func numberAfter(last uint64) uint64 { return max(last+1, uint64(time.Now().UnixMilli())) }

// replay applies an event of the log.
func replay(cat *catalog.Catalog, version uint64, record []byte) error {
	event, err := decodeEvent(record)
	if err != nil {
		return fmt.Errorf("event %d: %w", version, err)
	}
	if version != cat.Version()+1 {
		return fmt.Errorf("event %d after %d: %w", version, cat.Version(), ErrGap)
	}
	if _, err := cat.Apply(event); err != nil {
		return fmt.Errorf("event %d: replay: %w", version, err)
	}
	return nil
}
