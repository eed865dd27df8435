package queue

import (
	"testing"
	"time"
)

// BenchmarkSnapshot takes snapshots beside a backlog and messages in flight.
func BenchmarkSnapshot(b *testing.B) {
	const waiting, inFlight = 100_000, 2500
	top := withDisk(waiting+inFlight, 10)
	var fx Effects
	c := top.CreateChannel(0, "c", &fx)
	c.Consumers().Add(1, time.Minute, 0, Near)
	for n := range waiting + inFlight {
		if err := top.Put(0, &fx, message(n, 0)); err != nil {
			b.Fatal(err)
		}
	}
	if err := top.SetReady(0, c, 1, inFlight, &fx); err != nil {
		b.Fatal(err)
	}
	var out []byte
	for b.Loop() {
		out = top.Cursors().Snapshot(out[:0], wallOf)
	}
}
