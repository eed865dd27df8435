package conn

import (
	"testing"

	"github.com/srtm-io/srtm/nsq/session"
	"github.com/srtm-io/srtm/nsq/wire"
)

// A large command costs one copy for each doubling of the buffer, although an MPUB announces its remaining size only
// message by message. An announced size costs nothing before the bytes come.
func TestTheBufferGrowsByDoubling(t *testing.T) {
	cfg := session.DefaultConfig()
	body := make([]byte, 1000)
	bodies := make([][]byte, 5000)
	for i := range bodies {
		bodies[i] = body
	}
	for name, in := range map[string][]byte{
		"PUB":  wire.AppendPub(wire.AppendMagic(nil), "t", make([]byte, cfg.Limits.MaxMessageSize)),
		"MPUB": wire.AppendMpub(wire.AppendMagic(nil), "t", bodies),
	} {
		c := newClient(&env{cfg: Config{Session: &cfg}}, "", NSQ)
		copied, whole := 0, false
		for rest := in; len(rest) > 0; {
			before := len(c.buf)
			c.makeRoom()
			if grown := len(c.buf); grown != before {
				copied += c.w
				if grown > max(2*before, maxIdle) {
					t.Fatalf("%s: from %d to %d bytes", name, before, grown)
				}
			}
			n := copy(c.buf[c.w:], rest[:min(len(rest), 64<<10)])
			c.w, rest = c.w+n, rest[n:]
			for {
				var op session.Op
				n := c.sess.StepInto(c.buf[c.r:c.w], 0, &op)
				if c.r += n; op.Kind.Publishes() {
					whole = true
				}
				if n == 0 {
					break
				}
			}
		}
		if !whole || copied > 2*len(in) {
			t.Errorf("%s of %d bytes: whole: %v, %d bytes copied", name, len(in), whole, copied)
		}
	}
}
