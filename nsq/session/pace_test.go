package session_test

import (
	"strings"
	"testing"

	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/nsq/session"
	"github.com/srtm-io/srtm/nsq/wire"
)

func TestPace(t *testing.T) {
	for name, c := range map[string]struct {
		change func(*session.Config)
		want   string // prefix of the answers to the client
	}{
		"as of any publish":   {func(*session.Config) {}, "OK"},
		"where it is off":     {func(c *session.Config) { c.Limits.Pace = false }, `E_INVALID unknown command "PACE"`},
		"before AUTH":         {func(c *session.Config) { c.AuthRequired = true }, "E_AUTH_FIRST"},
		"before required TLS": {func(c *session.Config) { c.TLS, c.TLSRequired = true, true }, "E_INVALID PACE before TLS"},
	} {
		t.Run(name, func(t *testing.T) {
			cfg := session.DefaultConfig()
			cfg.Limits.Pace = true
			c.change(&cfg)
			s := session.New(&cfg, mono.Time(0))
			s.Step(wire.AppendMagic(nil), 0)
			if _, op := s.Step(wire.AppendPace(nil, 9), 0); op.Kind != session.OpNone {
				if op.Kind != session.OpPace || op.Ready != 9 {
					t.Fatalf("%v of weight %d", op.Kind, op.Ready)
				}
				s.Done(op, nil)
			}
			if _, heard, _, err := wire.ParseFrame(s.Output(), 1000); err != nil || !strings.HasPrefix(string(heard), c.want) {
				t.Errorf("answered %q, %v", heard, err)
			}
		})
	}
}

// The answer to a publish has the driver's advice, if the driver gives any.
func TestPublishesAreAnsweredWithAdvice(t *testing.T) {
	cfg := session.DefaultConfig()
	s := session.New(&cfg, mono.Time(0))
	s.Step(wire.AppendMagic(nil), 0)
	for _, reply := range [][]byte{nil, []byte("OK and more")} {
		_, op := s.Step(wire.AppendPub(nil, "t", []byte("b")), 0)
		op.Reply = reply
		s.Done(op, nil)
		want := "OK"
		if reply != nil {
			want = string(reply)
		}
		if _, heard, _, err := wire.ParseFrame(s.Output(), 1000); err != nil || string(heard) != want {
			t.Errorf("answered %q, %v; want %q", heard, err, want)
		}
		s.ClearOutput()
	}
}
