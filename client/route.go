package client

import (
	"errors"
	"fmt"
	"io"
	"log/slog"
	"sync"

	"github.com/nsqio/go-nsq"

	"github.com/srtm-io/srtm/pacing/header"
)

// route is one connection to a broker, on go-nsq's Conn.
//
// A Producer would do the same and more, and the more is in the way: it dials
// again on its own inside a publish, where no context bounds it; it does not
// say that an idle connection has ended; and after a break it does not tell a
// publish that was never written from one that was not answered, nor an
// orderly end from any other, on which the guarantee of this package rests.
type route struct {
	// set once
	address string
	paced   bool // the broker was asked what may be sent
	conn    *nsq.Conn
	notify  chan<- struct{} // holds one token: there is something to take
	advise  func(header.OK)

	// owned by Publisher.run
	open []*request // unanswered, oldest first

	in struct {
		sync.Mutex
		answers []answer
		limit   int // of answers, against a broker that says more than asked
		ended   error
		asked   chan<- error // gets the answer to PACE, then it is nil
	}
}

// answer is what a broker said to a publish: OK, or an error.
type answer struct {
	refused *RefusedError
}

// errSurplus: the broker sent an answer without a request.
var errSurplus = errors.New("broker sent more answers than there were publishes")

// dial connects and identifies, and with a weight asks to be told what may be sent.
func dial(address string, cfg *nsq.Config, limit int, weight uint8, advise func(header.OK), notify chan<- struct{}, log *slog.Logger) (*route, error) {
	r := &route{address: address, paced: weight > 0, notify: notify, advise: advise}
	r.in.limit = limit
	r.conn = nsq.NewConn(address, cfg, delegate{r})
	r.conn.SetLogger(quiet{log}, nsq.LogLevelWarning, "%s")
	if _, err := r.conn.Connect(); err != nil {
		return nil, errors.Join(fmt.Errorf("connect to broker %s: %w", address, err), r.conn.Close())
	}
	if weight > 0 {
		if err := r.askPace(weight); err != nil {
			return nil, errors.Join(err, r.conn.Close())
		}
	}
	return r, nil
}

// close begins to close the connection; go-nsq finishes on its own.
func (r *route) close() {
	_ = r.conn.Close() // what it could report is that it is closed
}

// take returns what has come in since.
func (r *route) take() (answers []answer, ended error) {
	r.in.Lock()
	defer r.in.Unlock()
	answers, r.in.answers = r.in.answers, nil
	return answers, r.in.ended
}

func (r *route) answered(a answer) {
	r.in.Lock()
	if asked := r.in.asked; asked != nil {
		r.in.asked = nil
		r.in.Unlock()
		if a.refused != nil {
			asked <- fmt.Errorf("%w: %s: %w", errNoPace, r.address, a.refused)
		} else {
			asked <- nil
		}
		return
	}
	if len(r.in.answers) < r.in.limit {
		r.in.answers = append(r.in.answers, a)
	} else if r.in.ended == nil {
		r.in.ended = errSurplus
	}
	r.in.Unlock()
	r.wake()
}

func (r *route) end(err error) {
	r.in.Lock()
	if r.in.ended == nil {
		r.in.ended = err
	}
	if asked := r.in.asked; asked != nil {
		r.in.asked = nil
		asked <- fmt.Errorf("broker %s did not answer PACE: %w", r.address, err) // there is room for it
	}
	r.in.Unlock()
	r.wake()
}

func (r *route) wake() {
	select {
	case r.notify <- struct{}{}:
	default:
	}
}

// orderly reports whether the broker ended the connection with a half-close.
func orderly(err error) bool { return errors.Is(err, io.EOF) }

// delegate is what go-nsq calls, from its own goroutines, and OnIOError also
// from within WriteCommand; nothing here may wait.
type delegate struct{ r *route }

func (d delegate) OnResponse(_ *nsq.Conn, data []byte) {
	if ok, err := header.ParseOK(data); err == nil {
		d.r.advise(ok)
	}
	d.r.answered(answer{})
}
func (d delegate) OnError(_ *nsq.Conn, data []byte)        { d.r.answered(answer{refused(data)}) }
func (d delegate) OnIOError(_ *nsq.Conn, err error)        { d.r.end(err) }
func (d delegate) OnClose(*nsq.Conn)                       { d.r.end(io.ErrClosedPipe) }
func (delegate) OnMessage(*nsq.Conn, *nsq.Message)         {}
func (delegate) OnMessageFinished(*nsq.Conn, *nsq.Message) {}
func (delegate) OnMessageRequeued(*nsq.Conn, *nsq.Message) {}
func (delegate) OnBackoff(*nsq.Conn)                       {}
func (delegate) OnContinue(*nsq.Conn)                      {}
func (delegate) OnResume(*nsq.Conn)                        {}
func (delegate) OnHeartbeat(*nsq.Conn)                     {}

// quiet gives go-nsq's lines to a structured logger. They repeat what this
// package reports in its own words, so they are for debugging only.
type quiet struct{ log *slog.Logger }

func (q quiet) Output(_ int, line string) error {
	q.log.Debug("go-nsq", "line", line)
	return nil
}
