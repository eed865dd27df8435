package session_test

import (
	"testing"

	"github.com/srtm-io/srtm/nsqd/session"
	"github.com/srtm-io/srtm/nsqd/wire"
)

func TestPublishIsAnsweredOK(t *testing.T) {
	cfg := session.DefaultConfig()
	if err := cfg.Validate(); err != nil {
		t.Fatal(err)
	}
	s := session.New(&cfg, 0)
	in := wire.AppendPub(wire.AppendMagic(nil), "t", []byte("body"))
	n, _ := s.Step(in, 1)
	n2, op := s.Step(in[n:], 1)
	if n+n2 != len(in) || op.Kind != session.OpPub || string(op.Topic) != "t" || string(op.Body) != "body" {
		t.Fatalf("consumed %d+%d of %d: %+v", n, n2, len(in), op)
	}
	s.Done(op, nil)
	if got, want := string(s.Output()), "\x00\x00\x00\x06\x00\x00\x00\x00OK"; got != want {
		t.Fatalf("output %q, want %q", got, want)
	}
}
