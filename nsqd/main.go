package main

import (
	"context"
	"errors"
	"math"
	"os"
	"runtime/debug"

	"github.com/srtm-io/srtm/internal/lifecycle"
	"github.com/srtm-io/srtm/internal/obs"
	"github.com/srtm-io/srtm/internal/settings"
)

func main() {
	os.Exit(lifecycle.Main("nsqd", func(ctx context.Context) error { return run(ctx, os.Args[1:]) }))
}

func run(ctx context.Context, args []string) error {
	opts, err := parse(args, os.Stdout)
	if errors.Is(err, settings.ErrDone) {
		return nil
	}
	if err != nil {
		return lifecycle.UsageError{Err: err}
	}
	if opts.PinArrivalStamps != "" {
		return pin(opts)
	}
	all, err := obs.NewLogger(obs.Stderr, "debug", opts.LogFormat)
	if err != nil {
		return lifecycle.UsageError{Err: err}
	}
	if limit := opts.memoryLimit(os.Getenv("GOMEMLIMIT"), os.DirFS("/")); limit > 0 {
		debug.SetMemoryLimit(limit)
	}
	limit := debug.SetMemoryLimit(-1)
	if opts.MaxMemoryBytes == 0 && limit < math.MaxInt64 {
		opts.MaxMemoryBytes = limit / 2
	}
	opts.fit(descriptors(), limit)
	d, err := open(ctx, opts, all.Handler())
	if err != nil {
		return err
	}
	return d.run(ctx)
}
