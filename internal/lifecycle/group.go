// Package lifecycle starts the parts of a daemon in order and stops them in reverse
// order, each before the next. It is the only place with a shutdown order. See the
// main.go of a daemon for an example.
package lifecycle

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
)

// Group is a set of parts that run together. The zero value is ready. Add all parts, then
// call Run once.
type Group struct {
	parts []part
}

type part struct {
	name string
	run  func(context.Context) error
}

// running is a started part.
type running struct {
	name   string
	cancel context.CancelFunc
	done   chan struct{} // closed after err is set
	err    error
}

// Add appends a part. run works until its context ends, and returns only after everything
// that run started has ended.
func (g *Group) Add(name string, run func(context.Context) error) {
	g.parts = append(g.parts, part{name, run})
}

// Run starts the parts in the order of Add and waits. When ctx ends, or a part returns an
// error, Run cancels the parts one by one, the last added first. It waits for each part
// before it cancels the next. So a part may rely on the parts added before it while it
// runs. A part that returns nil has finished, and the other parts continue. When all
// parts have finished, Run returns.
//
// Run returns the errors of all parts, in the order of their occurrence: first the error
// that stopped the group. context.Canceled from a part after its cancellation is not an
// error.
//
// The parts do not receive ctx itself, which would end for all of them at once, but
// contexts with its values.
func (g *Group) Run(ctx context.Context) error {
	var (
		started []*running
		ended   = make(chan *running, len(g.parts)) // room for all parts, so a part never waits to end
		wg      sync.WaitGroup
	)
	for _, p := range g.parts {
		partCtx, cancel := context.WithCancel(context.WithoutCancel(ctx))
		r := &running{name: p.name, cancel: cancel, done: make(chan struct{})}
		started = append(started, r)
		wg.Go(func() {
			r.err = p.run(partCtx)
			close(r.done)
			ended <- r
		})
	}

	var first *running // the part whose error stopped the group
	for left := len(started); left > 0 && first == nil && ctx.Err() == nil; {
		select {
		case r := <-ended:
			left--
			if r.err != nil {
				first = r
			}
		case <-ctx.Done():
		}
	}

	var errs []error
	if first != nil {
		errs = append(errs, first.wrapped())
	}
	for _, r := range slices.Backward(started) {
		stopped := !isClosed(r.done)
		r.cancel()
		<-r.done
		if r != first && r.err != nil && !(stopped && onlyCanceled(r.err)) {
			errs = append(errs, r.wrapped())
		}
	}
	wg.Wait()
	return errors.Join(errs...)
}

func (r *running) wrapped() error { return fmt.Errorf("%s: %w", r.name, r.err) }

func isClosed(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}

// onlyCanceled reports whether err is context.Canceled and nothing else. Every branch of
// a joined error must be context.Canceled, so no failure hides behind a cancellation.
func onlyCanceled(err error) bool {
	switch e := err.(type) {
	case interface{ Unwrap() []error }:
		for _, part := range e.Unwrap() {
			if !onlyCanceled(part) {
				return false
			}
		}
		return true
	case interface{ Unwrap() error }:
		return onlyCanceled(e.Unwrap())
	default:
		return err == context.Canceled
	}
}
