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
	// ErrFull: the store has no room. Nothing of what was to be kept is kept, or will be. The
	// term goes on, and the same may be tried again.
	ErrFull = errors.New("the store has no room")
	// ErrGap: the events do not begin where the log ends. Another process has
	// appended, or the caller has lost count; in either case it must load anew.
	ErrGap = errors.New("the events do not continue the log")
)

// Store is a log of events with at most one leader.
type Store interface {
	// Lead waits until this process leads, and returns its term and the catalog
	// as the log has it. advertise is what Leader tells others. It may be called
	// again when the term has ended.
	Lead(ctx context.Context, advertise string) (Term, *catalog.Catalog, error)
	// Follow hands over the state of the log, and then every event that is
	// appended, in order, until ctx ends (nil) or the log cannot be read. When it
	// has fallen behind a compaction, or could not read the log for a while (Cut),
	// it hands over the state again.
	Follow(ctx context.Context, f Follower) error
	// Leader returns what the present leader advertises; empty: there is none.
	Leader(ctx context.Context) (string, error)
	// Close gives up what is open. Terms and Follow calls have ended before.
	Close() error
}

// Follower takes a log. Its calls come one at a time.
type Follower interface {
	Reset(*catalog.Catalog)
	Apply(catalog.Event) error
	Cut(error) // the log cannot be read, until the next Reset
}

// Term is one process' time as the leader. Its methods are for one goroutine,
// but for those that may be called at any time, and Lost.
type Term interface {
	// Append makes events durable, in their order; base is the version of the
	// catalog before the first. When it returns nil, no crash and no other leader
	// loses them. ErrFull keeps none of them, and the term goes on. After any other error some
	// of the first ones may have been kept, and the term is of no more use: ErrLost, ErrGap, or
	// what the medium said.
	Append(ctx context.Context, base uint64, events []catalog.Event) error
	// Compact puts the dump in the place of all events up to its version. After an
	// error the term goes on, with the events where they were.
	Compact(ctx context.Context, dump catalog.Dump) error
	// Number is greater than that of any term before it in this log, and counts
	// milliseconds since 1970 where it can: so it is greater, too, than those of a log
	// that this one was copied from or took the place of. At any time.
	Number() uint64
	// Until is when the term ends unless the store lets it go on meanwhile, by this
	// process' clock; mono.Never: no other process can take it away. No other term begins
	// before. At any time.
	Until() mono.Time
	// Lost is closed when the term ends without Resign.
	Lost() <-chan struct{}
	// Resign ends the term, so that another may begin at once.
	Resign(ctx context.Context) error
}

// alone is what a store of one process cannot do.
type alone struct{}

// errAlone: nothing but the leader can read these stores.
var errAlone = errors.New("the store is of one process: no other can follow it")

// Follow implements Store.
func (alone) Follow(context.Context, Follower) error { return errAlone }

// Leader implements Store.
func (alone) Leader(context.Context) (string, error) { return "", nil }

// Close implements Store.
func (alone) Close() error { return nil }

// term is what the terms of all stores have in common; nothing takes this one away. A
// store has a type of its own around it, which puts what records and dump return where it
// keeps that.
type term struct {
	number uint64
	head   uint64 // version of the last event
	over   bool
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

// records are what is to be appended, if it may be.
func (t *term) records(base uint64, events []catalog.Event) ([][]byte, error) {
	switch {
	case t.over:
		return nil, ErrLost
	case base != t.head:
		return nil, fmt.Errorf("append after %d, the log ends at %d: %w", base, t.head, ErrGap)
	}
	return encodeEvents(events)
}

// dump is what is to be put in the place of all events up to its version, if it may be.
func (t *term) dump(d catalog.Dump) ([]byte, error) {
	switch {
	case t.over:
		return nil, ErrLost
	case d.Version > t.head:
		return nil, fmt.Errorf("compact up to %d, the log ends at %d: %w", d.Version, t.head, ErrGap)
	}
	return encodeDump(d)
}

// numberAfter is the number of the term after one with the number last.
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
