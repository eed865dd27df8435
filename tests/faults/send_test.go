package faults

import (
	"bufio"
	"net"
	"slices"
	"sync/atomic"
	"testing"

	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/nsq/wire"
)

// A heartbeat between answers is no answer. A message counts as accepted only by its own answer: if the
// broker ends the connection before it answers the next messages, none of these messages is accepted.
func TestSendAnswersHeartbeats(t *testing.T) {
	near, far := net.Pipe()
	defer near.Close()
	heard := make(chan string, 1)
	go func() {
		defer close(heard)
		defer far.Close()
		in := bufio.NewReader(far)
		batch := func() error {
			for range 3 {
				if _, err := in.ReadString('\n'); err != nil {
					return err
				}
				if _, err := in.Discard(4 + 1); err != nil { // the length, and a number of one digit
					return err
				}
			}
			return nil
		}
		if batch() != nil {
			return
		}
		out := wire.AppendResponse(nil, wire.OK)
		out = wire.AppendResponse(out, wire.Heartbeat)
		out = wire.AppendError(out, &wire.Error{Code: wire.CodePubFailed, Text: "full"})
		out = wire.AppendResponse(out, wire.OK)
		written := make(chan struct{})
		go func() {
			defer close(written)
			_, _ = far.Write(out)
		}()
		text, _ := in.ReadString('\n')
		heard <- text
		if text == "NOP\n" {
			_ = batch()
			<-written
		}
	}()
	var c cluster
	var accepted atomic.Int64
	r := bufio.NewReader(near)
	testkit.NoError(t, c.send(near, r, 3, &accepted, func() bool { return true }))
	if err := c.send(near, r, 3, &accepted, func() bool { return true }); err == nil {
		t.Error("messages without answers were sent without an error")
	}
	near.Close()
	if text := <-heard; text != "NOP\n" {
		t.Errorf("the heartbeat was answered by %q", text)
	}
	numbers := c.ledger.missing()
	slices.Sort(numbers)
	if want := []int64{1, 3}; !slices.Equal(numbers, want) || accepted.Load() != 2 {
		t.Errorf("accepted are %v, %d in all, want %v", numbers, accepted.Load(), want)
	}
}
