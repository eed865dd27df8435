// Package identity decides which process owns a broker's id. An id belongs to one process
// at a time: two processes with one id would both use a share that was granted once. The
// package is pure, without sessions and leases. Its callers, loaddistributor/controller
// and tbadaptor/ledger, know whether the owner may still live. nsqd/agent acts on the
// answers.
package identity

import (
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/srtm-io/srtm/internal/mono"
)

// Reasons of refusals, in gRPC's ErrorInfo.
const (
	ReasonInUse = "BROKER_ID_IN_USE"
	ReasonLost  = "BROKER_ID_LOST"
)

// HeardKey is the key in the ErrorInfo of ReasonInUse for the owner's silence in
// milliseconds.
const HeardKey = "heard_ms"

// Process is a broker's process, as described by its hello.
type Process struct {
	Stamp mono.Stamp // the hello
	Place Place
}

// Place is the location of a process.
type Place struct {
	Address string // host:port for clients, for people
	Host    string // for people
	Folder  string // the data folder, for people
	// Lock names the lock that the process holds on its data folder. Two live processes
	// never share a Lock. Empty: unknown.
	Lock string
}

// Bounds of the fields of a Place, in bytes.
const (
	maxShort  = 255
	maxFolder = 4096
)

// Check calls fault for each field that is too long.
func (p Place) Check(fault func(field, format string, args ...any)) {
	for _, f := range []struct {
		name, value string
		limit       int
	}{
		{"tcp_address", p.Address, maxFolder}, {"hostname", p.Host, maxShort}, {"data_path", p.Folder, maxFolder}, {"lock", p.Lock, maxShort},
	} {
		if len(f.value) > f.limit {
			fault("hello."+f.name, "has %d bytes, at most %d", len(f.value), f.limit)
		}
	}
}

// String describes the process for an operator.
func (p Place) String() string {
	var parts []string
	if p.Host != "" {
		parts = append(parts, "host "+p.Host)
	}
	if p.Folder != "" {
		parts = append(parts, "data folder "+p.Folder)
	}
	s := "nsqd"
	if p.Address != "" {
		s += " at " + p.Address
	}
	if len(parts) > 0 {
		s += " (" + strings.Join(parts, ", ") + ")"
	}
	return s
}

// Owner is the process that owns an id. The zero Owner means that no process owns the id.
type Owner struct {
	Process
	past  []string // earlier instances, oldest first, at most maxPast
	ended bool     // the process has provably ended
}

// maxPast bounds the remembered instances of an id. Messages from these instances are
// refused after another process has taken the id.
const maxPast = 8

// ErrReplaced: the process has sent a later hello.
var ErrReplaced = errors.New("the same process has sent a later hello")

// InUse refuses a process because the id belongs to another process that may live.
type InUse struct {
	ID             string
	Owner, Refused Place
	Heard          time.Duration // since the owner's last message
}

func (e *InUse) Error() string {
	return fmt.Sprintf("broker id %q is in use: it belongs to %s, heard %v ago; refused is %s",
		e.ID, e.Owner, e.Heard.Round(time.Millisecond), e.Refused)
}

// Metadata returns the metadata of the refusal's ErrorInfo.
func (e *InUse) Metadata() map[string]string {
	return map[string]string{HeardKey: strconv.FormatInt(e.Heard.Milliseconds(), 10)}
}

// Lost refuses a process because the id belongs to a later process.
type Lost struct {
	ID             string
	Owner, Refused Place
}

func (e *Lost) Error() string {
	return fmt.Sprintf("broker id %q belongs to a later process now, %s; refused is %s", e.ID, e.Owner, e.Refused)
}

// Check returns nil if p may own the id from now on. lives reports whether the owner may
// live according to its sessions and leases. silent is the time since the owner's last
// message. The owner has provably ended after End, or if p now holds the owner's lock on
// its data folder. Errors: ErrReplaced, *InUse, *Lost.
func (o *Owner) Check(id string, p Process, lives bool, silent time.Duration) error {
	same := o.Stamp.Process == p.Stamp.Process
	handedOn := o.Place.Lock != "" && o.Place.Lock == p.Place.Lock
	switch {
	case o.Stamp.Process == "":
		return nil
	case same && p.Stamp.At < o.Stamp.At:
		return ErrReplaced
	case same:
		return nil
	case slices.Contains(o.past, p.Stamp.Process), handedOn && p.Stamp.At < o.Stamp.At:
		return &Lost{ID: id, Owner: o.Place, Refused: p.Place}
	case handedOn, o.ended, !lives:
		return nil
	}
	return &InUse{ID: id, Owner: o.Place, Refused: p.Place, Heard: silent}
}

// Take makes p the owner of the id. Requires: Check returned nil.
func (o *Owner) Take(p Process) {
	if owner := o.Stamp.Process; owner != "" && owner != p.Stamp.Process {
		o.past = append(o.past, owner)
		o.past = o.past[max(0, len(o.past)-maxPast):]
	}
	o.Process, o.ended = p, false
}

// End records that the process of the given instance has ended. If another process owns
// the id, End does nothing.
func (o *Owner) End(instance string) {
	if o.Stamp.Process == instance {
		o.ended = true
	}
}
