package lifecycle

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"sync"
	"time"

	"google.golang.org/grpc"

	"github.com/srtm-io/srtm/internal/clock"
)

// Grace is how long a stopping server waits for requests in progress before it cuts them
// off. Supervisors kill a daemon a few seconds later.
const Grace = time.Second

// Together returns a part that combines all the parts, started and stopped at the same
// time. When one part ends with an error, Together stops the others.
func Together(parts ...func(context.Context) error) func(context.Context) error {
	return func(ctx context.Context) error {
		ctx, cancel := context.WithCancel(ctx)
		defer cancel()
		errs := make([]error, len(parts))
		var wg sync.WaitGroup
		for i, run := range parts {
			wg.Go(func() {
				if errs[i] = run(ctx); errs[i] != nil {
					cancel()
				}
			})
		}
		wg.Wait()
		return errors.Join(errs...)
	}
}

// acceptPause separates two attempts to accept a connection.
const acceptPause = 100 * time.Millisecond

// ServeConns serves each connection of ln in its own goroutine until ctx ends or ln
// fails. Then it ends the context of serve and waits for all calls of serve. failed
// receives the errors of accepting a connection, for example with too many open files;
// ServeConns retries. ServeConns closes ln and the connections.
func ServeConns(ctx context.Context, name string, ln net.Listener, failed func(error), serve func(context.Context, net.Conn)) error {
	var all sync.WaitGroup
	defer all.Wait()
	connCtx, stop := context.WithCancel(ctx)
	defer stop()
	defer ln.Close()
	defer context.AfterFunc(ctx, func() { _ = ln.Close() })() // ends Accept
	for {
		conn, err := ln.Accept()
		switch {
		case ctx.Err() != nil:
			if err == nil {
				_ = conn.Close() // too late
			}
			return nil
		case errors.Is(err, net.ErrClosed):
			return fmt.Errorf("serve %s on %v: %w", name, ln.Addr(), err)
		case err != nil:
			failed(err)
			clock.Sleep(ctx, acceptPause)
		default:
			all.Go(func() {
				defer conn.Close()
				serve(connCtx, conn)
			})
		}
	}
}

// HTTP returns a server of handler whose clients cannot hold resources forever by not
// sending or not reading. This includes a body that no handler reads.
func HTTP(handler http.Handler, log *slog.Logger) *http.Server {
	return &http.Server{
		Handler:           handler,
		ReadHeaderTimeout: 5 * time.Second,
		ReadTimeout:       time.Minute,
		MaxHeaderBytes:    64 << 10,
		WriteTimeout:      2 * time.Minute, // enough for a profile of half a minute
		IdleTimeout:       time.Minute,
		ErrorLog:          slog.NewLogLogger(log.Handler(), slog.LevelDebug), // clients' errors
	}
}

// Serve returns a part that serves srv on ln. When its context ends, the part stops
// accepting, waits up to Grace for requests in progress, and cuts off the rest, which is
// not an error. It closes ln.
func Serve(ln net.Listener, srv *http.Server) func(context.Context) error {
	return ServeWithin(ln, srv, func() time.Duration { return Grace })
}

// ServeWithin is Serve with the bound of grace, called at the stop, instead of Grace.
// With a bound near StopLimit or above it, the daemon must Hold.
func ServeWithin(ln net.Listener, srv *http.Server, grace func() time.Duration) func(context.Context) error {
	return func(ctx context.Context) error {
		served := make(chan error, 1)
		go func() { served <- srv.Serve(ln) }()
		select {
		case err := <-served:
			// The listener failed, but its connections may still be open.
			return errors.Join(fmt.Errorf("serve HTTP on %v: %w", ln.Addr(), err), srv.Close())
		case <-ctx.Done():
		}
		graceful, cancel := context.WithTimeout(context.WithoutCancel(ctx), grace())
		defer cancel()
		err := srv.Shutdown(graceful)
		if errors.Is(err, context.DeadlineExceeded) {
			err = srv.Close()
		}
		if end := <-served; !errors.Is(end, http.ErrServerClosed) {
			err = errors.Join(end, err)
		}
		if err != nil {
			return fmt.Errorf("stop HTTP on %v: %w", ln.Addr(), err)
		}
		return nil
	}
}

// ServeGRPC returns a part that serves srv on ln. When its context ends, the part stops
// accepting, waits up to Grace for calls in progress, and cuts off the rest, which is not
// an error. It closes ln.
//
// An endless stream is a call in progress. The service must end it when the daemon stops,
// or every shutdown takes the whole Grace.
func ServeGRPC(ln net.Listener, srv *grpc.Server) func(context.Context) error {
	return func(ctx context.Context) error {
		served := make(chan error, 1)
		go func() { served <- srv.Serve(ln) }()
		select {
		case err := <-served:
			srv.Stop()
			return fmt.Errorf("serve gRPC on %v: %w", ln.Addr(), err)
		case <-ctx.Done():
		}
		graceful := make(chan struct{})
		go func() {
			srv.GracefulStop()
			close(graceful)
		}()
		limit := time.NewTimer(Grace)
		defer limit.Stop()
		select {
		case <-graceful:
		case <-limit.C:
			srv.Stop() // also ends GracefulStop
			<-graceful
		}
		if err := <-served; err != nil && !errors.Is(err, grpc.ErrServerStopped) {
			return fmt.Errorf("stop gRPC on %v: %w", ln.Addr(), err)
		}
		return nil
	}
}
