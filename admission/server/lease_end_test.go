package server

import (
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/srtm-io/srtm/admission/table"
	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/internal/testkit"
)

func TestLeaseEndOfAReplica(t *testing.T) {
	for _, test := range []struct {
		what string
		r    replica
		age  time.Duration // how long ago the store was read
		want time.Duration
	}{
		{"fresh", replica{heartbeat: 3}, 0, 5 * time.Second},
		{"long ago", replica{heartbeat: 3}, 57 * time.Second, 2 * time.Second},
		{"too long ago", replica{heartbeat: 3}, 59 * time.Second, 0},
		{"not its follower", replica{}, 0, 0},
		{"replaced", replica{heartbeat: 3, replaced: 3}, 0, 0},
		{"which failed, for it has renewed", replica{heartbeat: 4, replaced: 3}, 0, 5 * time.Second},
		{"ended", replica{heartbeat: 4, recovered: true}, 0, 0},
	} {
		testkit.Equal(t, test.r.promise(0, mono.Time(test.age)), test.want, "%s", test.what)
	}
}

// A server that stops forgets everything, including what it saves meanwhile for another server.
func TestWhatIsForgottenIsSaved(t *testing.T) {
	l := &replicas{max: 1}
	l.become(1)
	l.process(2).keys.Put(table.Sent{Credit: table.Credit{Key: "k"}})
	some := l.unsaved(2, 1)
	l.become(0)
	l.saved(2, some)
	testkit.Equal(t, len(l.unsaved(2, 1)), 0, "keys of a process that was forgotten")
}

// Clocks that differ by less than a sixtieth: an owner has stopped strict keys before another server
// takes over, on whichever lease the owner relied.
func TestClocksRunApart(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		// Each counts a second in so many of true time.
		pace := rapid.Float64Range(0.9918, 1.0082)
		owner, follower, other := pace.Draw(t, "owner"), pace.Draw(t, "follower"), pace.Draw(t, "other")
		takes := func(d time.Duration, pace float64) float64 { return d.Seconds() * pace }
		if end := takes(strictOver, owner); end >= takes(leaseOver, follower) {
			t.Fatalf("the owner stops %.3f s after it sent, the follower takes over before", end)
		}
		// The follower read the store at 0, and answers the owner's message late.
		at := rapid.Float64Range(0, 59).Draw(t, "answered")
		r := replica{heartbeat: 1}
		lease := r.promise(0, mono.Time(at/follower*1e9))
		if end := at + takes(lease, owner); lease > 0 && end >= takes(leaseOver, follower)+at {
			t.Fatalf("the owner stops at %.3f s, the follower takes over before", end)
		} else if lease > 0 && end >= 60*other {
			t.Fatalf("the owner stops at %.3f s, another takes over at %.3f s", end, 60*other)
		}
	})
}
