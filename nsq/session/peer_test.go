package session_test

import (
	"errors"
	"fmt"
	"strings"

	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/nsq/session"
	"github.com/srtm-io/srtm/nsq/wire"
)

const testID = "0123456789abcdef"

var id = wire.MessageID([]byte(testID))

// peer is a small real driver. It feeds a session, carries out the operations by outcome, and records all effects.
type peer struct {
	s   *session.Session
	now mono.Time
	buf []byte

	// outcome decides an operation. nil means that all operations succeed. outcome may set op.Reply.
	outcome func(op *session.Op) error
	// late makes publishes wait for their Done until another operation comes, or settle is called.
	late    bool
	waiting []session.Op

	ops    []string
	frames []string
}

func newPeer(cfg *session.Config) *peer { return &peer{s: session.New(cfg, 0)} }

// connect is newPeer with the magic sent.
func connect(cfg *session.Config) *peer {
	p := newPeer(cfg)
	p.send(wire.AppendMagic(nil))
	return p
}

// send gives bytes to the session and runs the session until it needs more bytes.
func (p *peer) send(b []byte) *peer {
	p.buf = append(p.buf, b...)
	for {
		n, op := p.s.Step(p.buf, p.now)
		if op.Kind != session.OpNone {
			p.ops = append(p.ops, describe(op))
			publish := op.Kind == session.OpPub || op.Kind == session.OpMpub || op.Kind == session.OpDpub
			if p.late && publish {
				p.waiting = append(p.waiting, op)
			} else {
				p.settle()
				p.done(op)
			}
		}
		p.buf = p.buf[n:]
		if n == 0 && op.Kind == session.OpNone {
			break
		}
	}
	if !p.late {
		p.take()
	}
	return p
}

// settle answers the waiting publishes.
func (p *peer) settle() {
	for _, op := range p.waiting {
		p.done(op)
	}
	p.waiting = nil
}

func (p *peer) done(op session.Op) {
	var err error
	if p.outcome != nil {
		err = p.outcome(&op)
	}
	p.s.Done(op, err)
}

// take moves the output into frames.
func (p *peer) take() {
	out := p.s.Output()
	for len(out) > 0 {
		kind, data, n, err := wire.ParseFrame(out, 1<<20)
		if err != nil || n == 0 {
			panic(fmt.Sprintf("the session's output is no frame: n=%d %v %q", n, err, out))
		}
		p.frames = append(p.frames, kind.String()+" "+string(data))
		out = out[n:]
	}
	p.s.ClearOutput()
}

// heard returns the frames since the last call.
func (p *peer) heard() []string {
	p.take()
	f := p.frames
	p.frames = nil
	return f
}

// did returns the operations since the last call.
func (p *peer) did() []string {
	o := p.ops
	p.ops = nil
	return o
}

// ended is "" while the session is open, or else the code that ended the session.
func (p *peer) ended() string {
	closing, cause := p.s.Closing()
	var e *wire.Error
	switch {
	case !closing && cause == nil:
		return ""
	case closing && errors.As(cause, &e):
		return string(e.Code)
	case closing && errors.Is(cause, session.ErrSilent):
		return "silent"
	}
	return fmt.Sprintf("closing=%v cause=%v", closing, cause)
}

// at moves the clock to t after the start, and ticks at every deadline on the
// way.
func (p *peer) at(t mono.Time) *peer {
	for d := p.s.Deadline(); d <= t; d = p.s.Deadline() {
		p.now = d
		p.s.Tick(d)
	}
	p.now = t
	return p
}

func describe(op session.Op) string {
	var b strings.Builder
	b.WriteString(op.Kind.String())
	if len(op.Topic) > 0 {
		fmt.Fprintf(&b, " topic=%s", op.Topic)
	}
	if len(op.Channel) > 0 {
		fmt.Fprintf(&b, " channel=%s", op.Channel)
	}
	if len(op.Body) > 0 {
		fmt.Fprintf(&b, " body=%q", op.Body)
	}
	op.Batch.Each(func(m []byte) { fmt.Fprintf(&b, " message=%q", m) })
	if op.Defer != 0 {
		fmt.Fprintf(&b, " defer=%v", op.Defer)
	}
	if op.Kind == session.OpRdy {
		fmt.Fprintf(&b, " ready=%d", op.Ready)
	}
	if op.ID != (wire.MessageID{}) {
		fmt.Fprintf(&b, " id=%s", op.ID)
	}
	if op.Timeout != 0 {
		fmt.Fprintf(&b, " timeout=%v", op.Timeout)
	}
	if op.Kind == session.OpDeflate {
		fmt.Fprintf(&b, " level=%d", op.Level)
	}
	return b.String()
}
