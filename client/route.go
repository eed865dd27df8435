package client

import (
	"context"
	"errors"
	"fmt"
	"io"
	"sync"

	"github.com/nsqio/go-nsq"

	"github.com/srtm-io/srtm/pacing/header"
)

// route is a connection to a broker, with the publishes on the connection.
//
// go-nsq's Producer does more, but its additions conflict with the guarantees of this
// package. It reconnects inside a publish, where no context bounds the wait. It does not
// report the end of an idle connection. After a break it distinguishes neither unwritten
// from unanswered publishes, nor an orderly end from other ends.
type route struct {
	// set once
	address string
	paced   bool // advice was requested from the broker
	conn    *Conn
	notify  chan<- struct{} // holds one token: there is news
	advise  func(header.OK)

	// owned by Publisher.run
	open []*request // unanswered requests, oldest first

	in struct {
		sync.Mutex
		answers   []answer
		limit     int // maximum number of answers, in case the broker sends more than requested
		cause     error
		paceReply chan<- error // receives the answer to PACE; nil afterwards
	}
}

// answer is a broker's answer to a publish: OK, or an error.
type answer struct {
	refused *RefusedError
}

// errSurplus: the broker sent an answer without a request.
var errSurplus = errors.New("broker sent more answers than there were publishes")

// dial connects and identifies. With a weight it also requests advice. The goroutine that
// reads the connection is counted in all, and ends with the connection.
func dial(ctx context.Context, address string, cfg *nsq.Config, limit int, weight uint8, advise func(header.OK), notify chan<- struct{}, all *sync.WaitGroup) (*route, error) {
	r := &route{address: address, paced: weight > 0, notify: notify, advise: advise}
	r.in.limit = limit
	var err error
	if r.conn, err = Dial(ctx, address, cfg); err != nil {
		return nil, fmt.Errorf("connect to broker %s: %w", address, err)
	}
	all.Go(func() { r.conn.read(r) })
	if weight > 0 {
		if err := r.askPace(ctx, weight); err != nil {
			r.close()
			return nil, err
		}
	}
	return r, nil
}

// close closes the connection.
func (r *route) close() { r.conn.Close() }

// drain returns the answers since the last call.
func (r *route) drain() (answers []answer, cause error) {
	r.in.Lock()
	defer r.in.Unlock()
	answers, r.in.answers = r.in.answers, nil
	return answers, r.in.cause
}

func (r *route) answered(a answer) {
	r.in.Lock()
	if reply := r.in.paceReply; reply != nil {
		r.in.paceReply = nil
		r.in.Unlock()
		if a.refused != nil {
			reply <- fmt.Errorf("%w: %s: %w", errNoPace, r.address, a.refused)
		} else {
			reply <- nil
		}
		return
	}
	if len(r.in.answers) < r.in.limit {
		r.in.answers = append(r.in.answers, a)
	} else if r.in.cause == nil {
		r.in.cause = errSurplus
	}
	r.in.Unlock()
	r.wake()
}

func (r *route) end(err error) {
	r.in.Lock()
	if r.in.cause == nil {
		r.in.cause = err
	}
	if reply := r.in.paceReply; reply != nil {
		r.in.paceReply = nil
		reply <- fmt.Errorf("broker %s did not answer PACE: %w", r.address, err) // the channel has room
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

// handlePaceAdvice handles a response.
func (r *route) handlePaceAdvice(data []byte) {
	if ok, err := header.ParseOK(data); err == nil {
		r.advise(ok)
	}
	r.answered(answer{})
}
